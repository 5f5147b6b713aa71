"""Who may ask, and what a request is called."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import logs
from .config import ApiConfig
from .errors import ID_HEADER, unauthorized

OPEN = frozenset({"/health", "/health_generate", "/ping", "/ready", "/version"})
"""Paths of probes, which need no key."""

ADMIN = frozenset({"/abort_request", "/flush_cache", "/kvkeep/evict"})
"""Paths of operators. They need the admin key, or if there is none, the API key."""

METRICS = "/metrics"
"""It needs the admin key, or none if there is none."""

logger = logging.getLogger(__name__)

_GIVEN_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Keys:
    """ASGI middleware that asks for ``Authorization: Bearer KEY``."""

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._key, self._admin_key = config.api_key, config.admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(scope):
            await unauthorized(Request(scope))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in OPEN:
            return True
        if path == METRICS or (path in ADMIN and self._admin_key):
            keys = [self._admin_key]
        else:
            keys = [self._key, self._admin_key]
        if keys[0] is None:
            return True
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")  # as clients of Anthropic send it
        bearer = given.strip().encode("latin-1")
        # a comparison takes the same time wherever the two differ
        return any(hmac.compare_digest(key.encode(), bearer) for key in keys if key)


class Requests:
    """ASGI middleware that names, counts and logs every request. It is the outermost.

    The name is the client's ``x-request-id`` or a new one. The response has it, too.

    Args:
        count: called with path and status of every response.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(ID_HEADER, "")
        name = given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        begin, status = time.perf_counter(), 500

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[ID_HEADER] = name
            await send(message)

        token = logs.request.set(name)
        try:
            await self._app(scope, receive, named)
        finally:
            self._count(scope["path"], status)
            seconds = time.perf_counter() - begin
            path = quote(scope["path"])  # it might have lines of its own
            logger.info("%s %s: %d in %.3f s", scope["method"], path, status, seconds)
            logs.request.reset(token)
