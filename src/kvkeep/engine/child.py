"""The main program of an engine's process; :mod:`.link` starts it and is its only client.

It ends when its parent says so, or when its parent has ended. Either way the engine fails what
still runs and writes what storage lacks, for as many seconds as it has.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import pkgutil
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from .. import logs
from ..schema import ConfigError, KvkeepError
from .errors import EngineDied
from .link import SECONDS, NotStarted, Ready, encode, pull, push
from .messages import Request

log = logging.getLogger(__name__)

_FLUSH_MS = 1000  # the parent reads the last replies well within this
_EXIT_SECONDS = 1.0  # an engine that used all its time has so much longer to close its files


def main() -> None:
    """Make an engine, serve it, close it. Arguments: the lifeline's descriptor, a directory."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    lifeline, directory = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    lifeline.set_inheritable(False)
    context: zmq.Context[Any] = zmq.Context()
    try:
        requests, replies = (
            pull(context, directory, "requests"),
            push(context, directory, "replies"),
        )
    except zmq.ZMQError:
        if directory.exists():
            raise
        return  # the parent was interrupted and has given up
    leave = _Leave(lifeline, directory)
    make, config, choice, leave.grace = pickle.loads(requests.recv())
    logs.configure(choice)
    try:
        engine = pkgutil.resolve_name(make)(config)
    except Exception as error:
        said = _named(error)
        replies.send(encode(NotStarted(type(said).__name__, str(said))))
    else:
        leave.serving = True
        _serve(engine, lifeline, requests, replies, leave)
    finally:
        context.destroy(linger=_FLUSH_MS)
        shutil.rmtree(directory, ignore_errors=True)  # the parent may be gone


class _Leave:
    """Watches the lifeline on a thread; ends the process when its time is over.

    Args:
        directory: removed then.
    """

    def __init__(self, lifeline: socket.socket, directory: Path) -> None:
        self.seconds: queue.SimpleQueue[float] = queue.SimpleQueue()  # gets one item: what is left
        self.grace = 0.0  # for an end that the parent did not announce
        self.serving = False  # there is something to end in order
        self._lifeline, self._directory = lifeline, directory
        threading.Thread(target=self._watch, name="kvkeep-lifeline", daemon=True).start()

    def _watch(self) -> None:
        told = self._lifeline.recv(SECONDS.size)  # nothing: the parent has ended
        seconds: float = SECONDS.unpack(told)[0] if told else self.grace
        if self.serving:
            self.seconds.put(seconds)
            time.sleep(seconds and seconds + _EXIT_SECONDS)
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(1)  # what hangs may hang


def _serve(
    engine: Any,
    lifeline: socket.socket,
    requests: zmq.Socket[bytes],
    replies: zmq.Socket[bytes],
    leave: _Leave,
) -> None:
    """Pass messages until the lifeline ends, then close the engine."""
    gc.collect()
    gc.freeze()  # so that no collection in the midst of a hit scans all that was loaded
    engine.listen(lambda reply: replies.send(encode(reply), zmq.NOBLOCK))
    replies.send(encode(Ready(engine.info)))
    engine.start()
    decode = msgspec.msgpack.Decoder(Request).decode
    poller = zmq.Poller()
    poller.register(requests, zmq.POLLIN)
    poller.register(lifeline.fileno(), zmq.POLLIN)
    while lifeline.fileno() not in dict(poller.poll()):
        engine.send(decode(requests.recv()))
    engine.close(leave.seconds.get())
    gc.unfreeze()  # Python collects at exit; what it skips, Triton's library calls leaked


def _named(error: Exception) -> KvkeepError:
    """``error`` as one that a parent can name to its operator."""
    first = str(error).partition("\n")[0]
    if isinstance(error, KvkeepError):
        return error
    if isinstance(error, MemoryError) or "out of memory" in first or "allocate memory" in first:
        return ConfigError(
            f"memory does not suffice: {first or 'out of memory'}; --max-total-tokens or "
            "--mem-fraction-static bounds the device's pool, --hicache-ratio or --hicache-size "
            "the host's"
        )
    log.exception("could not make an engine")
    return EngineDied(f"the engine did not start: {type(error).__name__}: {first}")


if __name__ == "__main__":
    main()
