"""The connections of clients, and an end to the server's patience with slow ones.

==================================  ================================  ==========================
a client that                       flag                              gets
==================================  ================================  ==========================
is slow with line and headers       ``--header-timeout``              408, and the end
is slow with a body                 ``--body-timeout``                408 (:mod:`.limits`)
does not read its answer            ``--write-timeout``               the end; requests aborted
sends no further request            ``--keep-alive-timeout``          the end
is one too many                     ``--max-connections``             503, but for probes
==================================  ================================  ==========================

Event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from functools import partial
from typing import Any

import h11
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .access import METRICS, OPEN
from .config import ApiConfig
from .errors import crowded, raw
from .metrics import Metrics

SPARE = 64
"""Connections beyond the maximum that get a 503 and may probe; further ones are closed at once."""

LEAST_READ = 16 << 10
"""Bytes that a client must read of a pending answer within ``--write-timeout``."""

UNSENT = 128 << 10
"""Bytes of an answer that the kernel keeps, besides what it has sent. Else it keeps megabytes."""

_OTHER_FILES = 256  # open files that are no connections: storage, sockets, libraries
_SURPLUS = "surplus"  # in a scope's state: the connection is one too many
_WARNED = (h11.IDLE, h11.SEND_RESPONSE)  # states in which h11 lets a server send a response


def options(api: ApiConfig, metrics: Metrics) -> dict[str, Any]:
    """Options of uvicorn so that its connections are those of this module."""
    return {
        "http": partial(Connection, api, metrics),
        "h11_max_incomplete_event_size": 64 << 10,  # bytes of a request's line and headers
        "timeout_keep_alive": api.keep_alive_timeout,
        "ws": "none",
        "access_log": False,
        "log_config": None,
    }


def allow_files(connections: int) -> int | None:
    """Let this process have so many connections, and files besides.

    Returns the limit of open files if that is too low, otherwise None.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most, needed = (hard if hard >= 0 else 1 << 20), connections + SPARE + _OTHER_FILES
    if 0 <= soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, most), hard))
    return most if most < needed else None


class Connection(H11Protocol):
    """A connection that ends if its client is too slow, or is one too many.

    Args:
        metrics: counts why connections ended.
        given: what uvicorn makes its connections with.
    """

    def __init__(self, api: ApiConfig, metrics: Metrics, **given: Any) -> None:
        super().__init__(**given)
        self._api, self._metrics = api, metrics
        self._head: asyncio.TimerHandle | None = None  # while a request's line or headers may come
        self._stall: asyncio.TimerHandle | None = None  # while an answer waits for its reader
        self._unread = 0  # bytes that waited when the timer was set

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # what is not sent is always watched
        with contextlib.suppress(OSError):  # it is gone already, or no TCP
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT
            )
        self._metrics.connections.inc()
        surplus = len(self.connections) - self._api.max_connections
        if surplus > SPARE:
            self._cut("crowd")
        elif surplus > 0:
            self.app_state = self.app_state | {_SURPLUS: True}
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._metrics.connections.dec()
        for timer in (self._head, self._stall):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def _watch_head(self) -> None:
        """Bound the time until a request has begun, or until the rest of a refused body came."""
        if self.cycle and not self.cycle.response_complete:
            if self._head:
                self._head.cancel()
            self._head = None
        elif not self._head:
            refused = self.conn.their_state is h11.SEND_BODY
            seconds = self._api.body_timeout if refused else self._api.header_timeout
            self._head = self.loop.call_later(seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._metrics.cut.labels("headers").inc()
            self._refuse(408, f"no whole request came within {self._api.header_timeout:g} s")
        else:
            self._cut("headers")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall:
            self._stall.cancel()

    def _watch_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self._api.write_timeout, self._reader_is_late)

    def _reader_is_late(self) -> None:
        if self._unread - self.transport.get_write_buffer_size() < LEAST_READ:
            self._cut("reader")
        else:
            self._watch_reader()

    def _should_upgrade(self) -> bool:
        return False  # and no line in the log for each client that asks

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what never became a request, or stopped being one, and close."""
        if self.conn.our_state in _WARNED:
            if self.cycle:  # it must not answer, too
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._metrics.responded("", status)
            body = raw(message)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _cut(self, why: str) -> None:
        self._metrics.cut.labels(why).inc()
        self.transport.abort()


class Crowd:
    """ASGI middleware that answers surplus connections with a 503, but for probes and metrics."""

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app, self._most = app, config.max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        surplus = scope["type"] == "http" and scope.get("state", {}).get(_SURPLUS)
        if surplus and scope["path"] not in OPEN | {METRICS}:
            await crowded(Request(scope), self._most)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
