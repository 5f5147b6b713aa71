"""An engine in a process of its own, and the link to it.

::

    this process                                      the engine's process (child.py)

    send, any thread   PUSH ------ requests ------> PULL   main thread, then Engine.send
    pump thread        PULL <------ replies ------- PUSH   the engine's thread
    pump thread        ---------- lifeline ----------      a thread that watches

Requests and replies are MessagePack over ZeroMQ, through Unix sockets in a directory that only this
user may enter. Their queues have no limit, so sending neither blocks nor drops; each direction
keeps its order. The lifeline is a pair of connected sockets. The kernel closes a process's end when
the process ends, however it ends, so each side learns at once that the other is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import msgspec
import zmq

from .. import logs
from ..schema import Closed, ConfigError, KvkeepError, RequestError
from .errors import EngineDied, error_named
from .messages import Abort, Failed, ModelInfo, Output, Reply, Request

log = logging.getLogger(__name__)

ENGINE = "kvkeep.engine.core:Engine"
"""Names what a child makes an engine with, as ``module:object``; it is called with the config."""

RESTARTS = 3
"""So many restarts within ``RESTART_SECONDS``; when the engine dies again, it stays dead."""
RESTART_SECONDS = 600.0

_LAST_MS = 100  # a dead process's last replies may still be on their way, but no longer than this
_MARGIN_SECONDS = 2.0  # a child that was told to end and hangs is killed so much later
SECONDS = struct.Struct("d")
"""What a parent writes to the lifeline: how many seconds a child has left for an orderly end."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A child's first message: its engine serves."""

    info: ModelInfo


class NotStarted(msgspec.Struct, frozen=True, tag=True):
    """A child's first and last message: it could not make an engine."""

    kind: str  # the error's class
    message: str


def _plain(value: Any) -> Any:
    """NumPy's scalars as Python's."""
    return value.item()


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_first = msgspec.msgpack.Decoder(Ready | NotStarted).decode
_reply = msgspec.msgpack.Decoder(Reply).decode


def pull(context: zmq.Context[Any], directory: Path, name: str) -> zmq.Socket[bytes]:
    """The receiving end of the queue called ``name``."""
    end: zmq.Socket[bytes] = context.socket(zmq.PULL)
    end.set_hwm(0)
    end.bind(f"ipc://{directory / name}")
    return end


def push(context: zmq.Context[Any], directory: Path, name: str) -> zmq.Socket[bytes]:
    """The sending end. It queues messages also before the receiving end exists."""
    end: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    end.set_hwm(0)
    end.connect(f"ipc://{directory / name}")
    return end


class _Child:
    """One process, from its start to its end, with its sockets and their directory.

    Args:
        start: what the child's ``main`` unpickles.
    """

    def __init__(self, context: zmq.Context[Any], start: object) -> None:
        with contextlib.ExitStack() as made:
            at = tempfile.mkdtemp(prefix="kvkeep-")  # mode 0700
            made.callback(shutil.rmtree, at, ignore_errors=True)
            if len(os.fsencode(at)) + len("/requests") > zmq.IPC_PATH_MAX_LEN:
                raise ConfigError(f"{at} is too long a path for sockets: set TMPDIR")
            self._replies = pull(context, Path(at), "replies")
            made.callback(self._replies.close, linger=0)
            self.requests = push(context, Path(at), "requests")
            made.callback(self.requests.close, linger=0)
            self.requests.send(pickle.dumps(start))
            self._lifeline, theirs = socket.socketpair()
            made.callback(self._lifeline.close)
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", f"{__package__}.child", f"{theirs.fileno()}", at],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # signals of the terminal are for this process
                )
            self._poller = zmq.Poller()
            self._poller.register(self._replies, zmq.POLLIN)
            self._poller.register(self._lifeline.fileno(), zmq.POLLIN)
            self._made = made.pop_all()

    def started(self) -> ModelInfo:
        """Wait until the engine serves.

        Raises:
            KvkeepError: the child could not make it. The class is the one that the child named.
            EngineDied: the process ended before it could say why.
        """
        raw = self.receive()
        if raw is None:
            raise EngineDied(f"the engine's process ended while it started: {self.wait()}")
        first: Ready | NotStarted = _first(raw)
        match first:
            case Ready(info):
                return info
            case NotStarted(kind, message):
                raise error_named(kind, message)

    def receive(self) -> bytes | None:
        """The next message; waits for it. None: the process has ended."""
        if self._replies in dict(self._poller.poll()) or self._replies.poll(_LAST_MS):
            return self._replies.recv()
        return None

    def end(self, seconds: float) -> None:
        """Tell the process to end in order, within ``seconds``."""
        with contextlib.suppress(OSError):  # it has ended, or was told before
            self._lifeline.send(SECONDS.pack(seconds))
            self._lifeline.shutdown(socket.SHUT_WR)

    def wait(self, timeout: float = _MARGIN_SECONDS) -> str:
        """Wait for the end of the process, at most so many seconds, then kill it; say how it ended.

        A signal handler may interrupt this; then it kills the process, too.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        except BaseException:
            self.process.kill()
            raise
        return f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def close(self) -> None:
        """Remove what belonged to a process that has ended."""
        self._made.close()

    def kill(self) -> None:
        """End the process at once, and close."""
        self.process.kill()
        self.process.wait()
        self.close()


class RemoteEngine:
    """An engine in a process of its own: construct, ``listen``, ``start``, ``send``, ``close``.

    Construction starts the process and waits until its engine serves. When the process dies, all
    requests that it ran fail with :class:`EngineDied` at once, :meth:`send` raises it, and another
    process is started, at most ``RESTARTS`` times in ``RESTART_SECONDS``.

    Args:
        config: what the child's engine is made from. Must be picklable.
        load_tokenizer: loads ``tokenizer`` in this process, while the child loads the model.
        grace: seconds that the child has for an orderly end if this process dies.
        make: what makes the engine in the child, as ``module:object``.

    Raises:
        KvkeepError: the child could not make an engine. The class is the one it was there.
    """

    def __init__(
        self,
        config: object,
        load_tokenizer: Callable[[], Any],
        grace: float = 30.0,
        make: str = ENGINE,
    ) -> None:
        self._start = make, config, logs.chosen(), grace
        with contextlib.ExitStack() as on_error:
            self._context: zmq.Context[Any] = zmq.Context()
            on_error.callback(self._context.term)
            self._child = _Child(self._context, self._start)
            on_error.callback(self._child.kill)
            self.tokenizer = load_tokenizer()
            self.info = self._child.started()
            on_error.pop_all()
        self.lost: EngineDied | None = None  # set once the process is not started again
        self.restarts = 0  # times that the process was started again
        self._callback: Callable[[Reply], None] = lambda _: None
        self._lock = threading.Lock()  # for all below, and for sending
        self._refusal: Closed | None = None  # why nothing can be sent now
        self._pending: set[str] = set()  # requests that wait for their last reply
        self._closing = False
        self._pump = threading.Thread(target=self._run, name="kvkeep-link", daemon=True)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._child.process.pid

    def listen(self, callback: Callable[[Reply], None]) -> None:
        """Call ``callback`` on the pump's thread with every reply from now on."""
        self._callback = callback

    def start(self) -> None:
        """Start to receive replies and to watch the process."""
        self._pump.start()

    def send(self, message: Request) -> None:
        """Queue a message for the engine. Thread-safe, does not block.

        Raises:
            RequestError: the message has text that is not valid Unicode, or too large a number.
            EngineDied: the process died and no other serves yet.
            Closed: the engine was closed.
        """
        try:
            raw = encode(message)
        except (UnicodeEncodeError, OverflowError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None
        with self._lock:
            if self._refusal:
                raise copy(self._refusal)  # each has a traceback of its own
            match message:
                case Abort():
                    self._pending.discard(message.id)
                case _:
                    self._pending.add(message.id)
            self._child.requests.send(raw, zmq.NOBLOCK)

    def close(self, timeout: float = 30.0) -> None:
        """End the process, which fails all requests and writes what storage lacks. Idempotent.

        Kills a process that takes longer than ``timeout`` seconds, or if a signal handler raises.
        """
        with self._lock:
            self._closing = True
            self._refusal = self._refusal or Closed("the engine was closed")
            child = self._child
        child.end(timeout)
        child.wait(timeout + _MARGIN_SECONDS)
        if self._pump.ident is None:
            self._pump.start()
        self._pump.join()
        self._context.term()

    def _run(self) -> None:
        """The pump's thread. Whatever it raises, no request waits for ever."""
        try:
            self._serve()
        except Exception as error:
            log.exception("the link to the engine failed")
            self._child.kill()
            self.lost = EngineDied(f"the link to the engine failed: {error}")
            self._fail_all(self.lost)

    def _serve(self) -> None:
        """Deliver replies; when the process has ended, start another."""
        deaths: deque[float] = deque(maxlen=RESTARTS + 1)
        while True:
            while raw := self._child.receive():
                self._deliver(_reply(raw))
            how = self._child.wait()
            self._child.close()
            deaths.append(time.monotonic())
            often = len(deaths) > RESTARTS and deaths[-1] - deaths[0] < RESTART_SECONDS
            self._died(how, often)
            if self._closing or self.lost:
                return
            self._restart()

    def _deliver(self, reply: Reply) -> None:
        match reply:
            case Output():
                pass
            case _:
                with self._lock:
                    self._pending.discard(reply.id)
        try:
            self._callback(reply)
        except Exception:  # other requests must still get their replies
            log.exception("a reply to request %s could not be delivered", reply.id)

    def _died(self, how: str, often: bool) -> None:
        """Say so, and fail all requests."""
        if self._closing:
            self._fail_all(Closed("the engine was closed"))
            return
        what = f"the engine's process died ({how})"
        if often:
            what += f", {RESTARTS + 1} times within {RESTART_SECONDS / 60:.0f} minutes"
        error = EngineDied(what)
        self.lost = error if often else None
        log.error("%s; %d requests failed", what, len(self._pending))
        self._fail_all(error)

    def _fail_all(self, error: Closed) -> None:
        """Fail all requests with ``error``, and refuse others."""
        with self._lock:
            self._refusal = error
            pending, self._pending = self._pending, set()
        for name in pending:
            self._deliver(Failed(name, type(error).__name__, str(error)))

    def _restart(self) -> None:
        """Start another process and wait until it serves, or has ended, too.

        Raises:
            OSError: the system does not let a process start.
        """
        child = _Child(self._context, self._start)
        with self._lock:
            self._child = child
            if self._closing:
                child.end(0.0)
        try:
            child.started()
        except KvkeepError as error:
            log.error("the engine did not start again: %s", error)
            return
        self.restarts += 1
        with self._lock:
            if not self._closing:
                self._refusal = None
        log.warning("the engine's process was started again")
