"""The asyncio side of the engine's message interface."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from typing import Protocol, TypeVar

from ..schema import Closed, InvariantError, KvkeepError, RequestError
from .messages import (
    Abort,
    Ask,
    Done,
    Evict,
    Failed,
    Figures,
    Finished,
    Generate,
    ModelInfo,
    Output,
    Reply,
    Request,
)

Answer = TypeVar("Answer", Done, Figures)


class EngineLink(Protocol):
    """What a client needs of an engine, be it a thread or another process."""

    @property
    def info(self) -> ModelInfo: ...

    def send(self, message: Request) -> None:
        """Hand over a message. Thread-safe, does not block. Raises :class:`Closed`."""

    def listen(self, callback: Callable[[Reply], None]) -> None:
        """Have every reply from now on given to ``callback``, on the engine's thread."""


class EngineClient:
    """Awaitable requests to an engine, from any number of tasks and event loops."""

    def __init__(self, link: EngineLink) -> None:
        self.info = link.info
        self._link = link
        self._mailboxes: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Reply]]] = {}
        link.listen(self._deliver)

    async def generate(self, *requests: Generate) -> AsyncGenerator[Output | Finished, None]:
        """Run ``requests`` together and yield their replies as they come, told apart by ``id``.

        Ends with the last :class:`Finished`. What still runs is aborted when the iterator is
        closed, its task is cancelled, or one of the requests fails.

        Raises:
            RequestError: the engine refused a request.
            KvkeepError: a request failed; of the class that the engine named.
        """
        running = {request.id for request in requests}
        with self._mailbox(list(running)) as replies:
            try:
                for request in requests:
                    self._link.send(request)
                while running:
                    reply = await replies.get()
                    if isinstance(reply, Finished | Failed):
                        running.discard(reply.id)
                    if isinstance(reply, Output | Finished):
                        yield reply
                    else:
                        raise _error(reply)
            finally:
                with contextlib.suppress(Closed):
                    for name in running:
                        self._link.send(Abort(name))

    async def evict(self, tier: str) -> int:
        """Empty the ``"device"`` or ``"host"`` tier of all that is unpinned; how much that was."""
        return (await self._ask(Evict(_new_id(), tier), Done)).count

    async def figures(self) -> dict[str, float]:
        """The engine's metrics by name, as :class:`~kvkeep.engine.messages.Figures` has them."""
        return (await self._ask(Ask(_new_id()), Figures)).values

    async def _ask(self, message: Evict | Ask, kind: type[Answer]) -> Answer:
        with self._mailbox([message.id]) as replies:
            self._link.send(message)
            reply = await replies.get()
        if not isinstance(reply, kind):
            raise _error(reply)
        return reply

    @contextlib.contextmanager
    def _mailbox(self, ids: Collection[str]) -> Iterator[asyncio.Queue[Reply]]:
        """A queue of the replies to ``ids``, for the running event loop."""
        if taken := self._mailboxes.keys() & set(ids):
            raise RequestError(f"request id {min(taken)!r} is in use")
        box = asyncio.get_running_loop(), asyncio.Queue[Reply]()
        self._mailboxes.update(dict.fromkeys(ids, box))
        try:
            yield box[1]
        finally:
            for name in ids:
                del self._mailboxes[name]

    def _deliver(self, reply: Reply) -> None:
        """On the engine's thread. Replies that nobody waits for any more are dropped."""
        if box := self._mailboxes.get(reply.id):
            loop, queue = box
            with contextlib.suppress(RuntimeError):  # that loop was closed meanwhile
                loop.call_soon_threadsafe(queue.put_nowait, reply)


def _new_id() -> str:
    return uuid.uuid4().hex


def _error(reply: Reply) -> KvkeepError:
    """The exception that ``reply`` stands for."""
    if isinstance(reply, Failed):
        return _by_name(KvkeepError).get(reply.kind, KvkeepError)(reply.message)
    return InvariantError(f"the engine answered with an unexpected {type(reply).__name__}")


def _by_name(root: type[KvkeepError]) -> dict[str, type[KvkeepError]]:
    """``root`` and every class below it, by name."""
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _by_name(child)
    return found
