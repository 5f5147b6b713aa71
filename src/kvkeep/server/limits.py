"""Bounds on what one request may make the server hold and compute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..schema import RequestError
from .config import ApiConfig

MOST_LEVELS = 64
"""Nesting of a body. Parsers, validators and templates recurse: some fail at a few hundred."""

MOST_MESSAGES = 10_000  # of a chat: each is validated one by one, as are all objects in them
MOST_OBJECTS = 3 * MOST_MESSAGES
MOST_NAME = 1024  # characters of a name or a salt: the radix tree keeps salts
MOST_STOP = 1024  # characters of a stop string; stop tokens; stop strings whatever the flag

_NESTED = frozenset({dict, list})  # exact types, as a JSON parser makes them: a fast look-up

T = TypeVar("T")

Many = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: reports of a million take 30 seconds."""

SLOWEST = 1024
"""Bytes per second that a body must have on average, ``--body-timeout`` aside."""


_MOMENT = 0.001
"""Seconds, more than 0: then ``wait_for`` takes what has come, however late it is asked."""


class BodyLimits:
    """ASGI middleware that refuses bodies that are too large or come too slowly.

    The endpoint that reads the body gets the :class:`HTTPException`; others read none.
    """

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seconds, most = self._config.body_timeout, self._config.max_body_bytes
        stated = dict(scope["headers"]).get(b"content-length", b"0")
        length = int(stated) if stated.isdigit() else 0
        count, whole = 0, False
        begin = time.monotonic()

        async def bounded() -> Message:
            nonlocal count, whole
            if whole:  # what follows is the end of the connection, whenever it comes
                return await receive()
            if length > most:
                _refuse(most)
            left = begin + seconds + count / SLOWEST - time.monotonic()
            message = await _soon(receive, max(_MOMENT, min(seconds, left)))
            count += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            return _refuse(most) if count > most else message

        await self._app(scope, bounded, send)


def _refuse(most: int) -> Message:
    raise HTTPException(413, f"the body is larger than {most} bytes; --max-body-bytes allows more")


async def _soon(receive: Receive, seconds: float) -> Message:
    try:
        return await asyncio.wait_for(receive(), seconds)
    except TimeoutError:
        raise HTTPException(408, "the body came too slowly; --body-timeout allows more") from None


def is_deeper(value: Any, levels: int) -> bool:
    """Whether ``value``, a list or a dict, has more than ``levels`` levels; a flat one has 1."""
    here = [value]
    for _ in range(levels):
        here = [
            inner
            for outer in here
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in _NESTED
        ]
        if not here:
            return False
    return True


def has_more_objects(value: Any, most: int) -> bool:
    """Whether ``value``, a list or a dict of few levels, has more than ``most`` objects within."""
    found, here = 0, [value]
    while here and found <= most:
        here = [
            inner
            for outer in here
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in _NESTED
        ]
        found += sum(type(each) is dict for each in here)
    return found > most


def check_stop(strings: Sequence[str], most: int) -> None:
    """Raise :class:`RequestError` if there are more than ``most`` stop strings, or a long one."""
    if len(strings) > most:
        raise RequestError(
            f"stop has {len(strings)} strings; at most {most} are allowed (--max-stop-strings)"
        )
    if any(len(each) > MOST_STOP for each in strings):
        raise RequestError(f"stop has a string of more than {MOST_STOP} characters")


def check_names(names: Sequence[str], prompts: int) -> None:
    """Raise :class:`RequestError` if there are more than prompts may be: they are remembered."""
    if len(names) > prompts:
        raise RequestError(
            f"rid has {len(names)} names; at most {prompts} are allowed (--max-prompts-per-request)"
        )


def check_count(prompts: Sequence[Any], most: int) -> None:
    """Raise :class:`RequestError` if one request has more than ``most`` prompts."""
    if len(prompts) > most:
        raise RequestError(
            f"prompt has {len(prompts)} prompts; at most {most} are allowed "
            "(--max-prompts-per-request)"
        )
