"""The asyncio side of the engine's message interface."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from typing import Protocol, TypeVar

from ..schema import Aborted, Closed, InvariantError, KvkeepError, RequestError
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
    """The engine's side of the message interface: a thread today, perhaps a process later."""

    @property
    def info(self) -> ModelInfo: ...

    def send(self, message: Request) -> None:
        """Queue a message for the engine. Thread-safe, does not block. Raises :class:`Closed`."""

    def listen(self, callback: Callable[[Reply], None]) -> None:
        """Call ``callback`` on the engine's thread with every reply from now on."""


class EngineClient:
    """Asyncio client of an engine. Any number of tasks and event loops may share one."""

    def __init__(self, link: EngineLink) -> None:
        self.info = link.info
        self._link = link
        self._mailboxes: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Reply]]] = {}
        link.listen(self._deliver)

    async def generate(self, *requests: Generate) -> AsyncGenerator[Output | Finished, None]:
        """Run ``requests`` together and yield their replies as they arrive; ``id`` tells which.

        The iterator ends after the last :class:`Finished`. It aborts the requests that still run
        when it is closed, when its task is cancelled, and when one of the requests fails.

        Raises:
            RequestError: the engine refused a request, or its id is in use.
            KvkeepError: a request failed. The subclass is the one that the engine named.
            Closed: the engine was closed.
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

    def abort(self, name: str) -> None:
        """Fail a request, and those that it runs together with, with :class:`Aborted`."""
        self._deliver(Failed(name, Aborted.__name__, "the request was aborted"))
        with contextlib.suppress(Closed):
            self._link.send(Abort(name))

    async def evict(self, tier: str) -> int:
        """Evict every unpinned page from ``"device"`` or ``"host"``.

        Returns the number of evicted pages; a page counts once for each group that it loses.
        """
        return (await self._ask(Evict(_new_id(), tier), Done)).count

    async def figures(self) -> dict[str, float]:
        """Return the engine's metrics by name; see :class:`~kvkeep.engine.messages.Figures`."""
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
        """Route replies to ``ids`` into one queue of the running event loop."""
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
        """Route one reply. Runs on the engine's thread; drops replies without a mailbox."""
        if box := self._mailboxes.get(reply.id):
            loop, queue = box
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(queue.put_nowait, reply)


def _new_id() -> str:
    return uuid.uuid4().hex


def _error(reply: Reply) -> KvkeepError:
    """The exception to raise for ``reply``: of the class it names, if that is one of ours."""
    if isinstance(reply, Failed):
        return _by_name(KvkeepError).get(reply.kind, KvkeepError)(reply.message)
    return InvariantError(f"the engine answered with an unexpected {type(reply).__name__}")


def _by_name(root: type[KvkeepError]) -> dict[str, type[KvkeepError]]:
    """``root`` and all its subclasses, by name."""
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _by_name(child)
    return found
