"""The asyncio side of the engine's message interface. It makes text of the engine's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from typing import Any, Protocol, TypeVar

import msgspec

from ..schema import Closed, InvariantError, KvkeepError, RequestError
from .errors import Aborted, error_named
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
from .text import Detokenizer

Answer = TypeVar("Answer", Done, Figures)


class EngineLink(Protocol):
    """The engine's side of the message interface.

    :class:`~kvkeep.engine.core.Engine` is an engine on a thread of this process,
    :class:`~kvkeep.engine.link.RemoteEngine` one in a process of its own.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer, a fast one."""

    @property
    def restarts(self) -> int:
        """Times that the engine died and was started again."""

    def send(self, message: Request) -> None:
        """Queue a message for the engine. Thread-safe, does not block. Raises :class:`Closed`."""

    def listen(self, callback: Callable[[Reply], None]) -> None:
        """Call ``callback`` on the link's own thread with every reply from now on."""


class Piece(Output, frozen=True, kw_only=True):
    """New tokens of a request and the text that they complete."""

    text: str  # empty while a partial character or a possible stop string is held back


class EngineClient:
    """Asyncio client of an engine. Any number of tasks and event loops may share one."""

    def __init__(self, link: EngineLink) -> None:
        self.info = link.info
        self._link = link
        self._mailboxes: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Reply]]] = {}
        self.draining = False  # no new requests are taken
        link.listen(self._deliver)

    async def generate(self, *requests: Generate) -> AsyncGenerator[Piece | Finished, None]:
        """Run ``requests`` together and yield their replies as they arrive; ``id`` tells which.

        Text that was held back to the end comes in a piece without tokens. The iterator ends after
        the last :class:`Finished`. It aborts the requests that still run when it is closed, when
        its task is cancelled, and when one of the requests fails.

        Raises:
            RequestError: the engine refused a request, or its id is in use.
            KvkeepError: a request failed. The subclass is the one that the engine named.
            Closed: the engine was closed, or this client was told to :meth:`drain`.
        """
        if self.draining:
            raise _shutting_down()
        backend = self._link.tokenizer.backend_tokenizer
        running = {
            one.id: Detokenizer(backend, one.sampling.stop, one.sampling.spelled)
            for one in requests
        }
        with self._mailbox(list(running)) as replies:
            try:
                for request in requests:
                    self._link.send(request)
                while running:
                    match await replies.get():
                        case Output() as reply:
                            text, _ = running[reply.id].push(reply.tokens[: reply.shown])
                            yield Piece(**msgspec.structs.asdict(reply), text=text)
                        case Finished() as reply:
                            if rest := running.pop(reply.id).flush():
                                yield Piece(reply.id, [], 0, text=rest)
                            yield reply
                        case Failed() as reply:
                            del running[reply.id]
                            raise _error(reply)
                        case reply:
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

    @property
    def restarts(self) -> int:
        """Times that the engine died and was started again."""
        return self._link.restarts

    def drain(self) -> None:
        """Refuse requests to generate from now on; those that run go on. Any thread."""
        self.draining = True

    @property
    def busy(self) -> bool:
        """A request of any kind has not been answered yet."""
        return bool(self._mailboxes)

    def cut_off(self) -> None:
        """Fail every request that has not been answered with :class:`Closed`. Any thread."""
        error = _shutting_down()
        for name in list(self._mailboxes):
            self._deliver(Failed(name, type(error).__name__, str(error)))
            with contextlib.suppress(Closed):
                self._link.send(Abort(name))

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
        """Route one reply. Runs on the link's thread; drops replies without a mailbox."""
        if box := self._mailboxes.get(reply.id):
            loop, queue = box
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(queue.put_nowait, reply)


def _new_id() -> str:
    return uuid.uuid4().hex


def _shutting_down() -> Closed:
    return Closed("the server is shutting down")


def _error(reply: Reply) -> KvkeepError:
    """The exception to raise for ``reply``: of the class it names, if that is one of ours."""
    if isinstance(reply, Failed):
        return error_named(reply.kind, reply.message)
    return InvariantError(f"the engine answered with an unexpected {type(reply).__name__}")
