"""Parses large bodies in a process of their own.

Python's JSON parser keeps the interpreter's lock: 32 MiB of small values stop every thread of a
process for two to five seconds, and take a gigabyte. What comes back is bounded, so that taking it
over is short.
"""

from __future__ import annotations

import asyncio
import json
import marshal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from .service import while_connected

LARGE = 512 << 10
"""Bytes from which a body is parsed elsewhere."""

MOST_VALUES = 1 << 20
"""Values in a large body. A prompt of token ids has as many as tokens."""

_PROGRAM = Path(__file__).with_name("parse_json.py")
_one = ThreadPoolExecutor(1, "json")  # waits for the process; bodies take turns


class LargeBodies(APIRoute):
    """A route whose endpoint may get large bodies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return handle


class _Request(Request):
    async def json(self) -> Any:
        raw = await self.body()
        if len(raw) < LARGE:
            return await super().json()
        self._body = b""  # it may wait long for its answer
        return await while_connected(self, _elsewhere(raw))


async def _elsewhere(raw: bytes) -> Any:
    """See :func:`parse`. Not parsed if cancelled before its turn."""
    return await asyncio.get_running_loop().run_in_executor(_one, parse, raw)


def parse(raw: bytes) -> Any:
    """The value of ``raw``, as :func:`json.loads` has it.

    Raises:
        JSONDecodeError: it is not valid JSON.
        ValueError: it is nested too deeply, no UTF-8, or has a number of too many digits.
        HTTPException: it has too many values: 413. The system has no process for it: 503.
    """
    command = [sys.executable, "-I", "-S", str(_PROGRAM), str(MOST_VALUES)]
    try:
        done = subprocess.run(command, input=raw, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise HTTPException(503, f"the body could not be parsed: {error}") from None
    match marshal.loads(done.stdout):
        case ("value", value):
            return value
        case ("syntax", message, position):
            raise json.JSONDecodeError(message, "", position)
        case ("many",):
            raise HTTPException(413, f"the body has more than {MOST_VALUES} values")
    raise ValueError("it is nested too deeply, no UTF-8, or has a number of too many digits")
