"""What recent requests found in the cache: which tier had how much, and what limited the hit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any, NamedTuple

from fastapi import APIRouter, HTTPException

from ..engine.messages import Finished
from .answers import Replies, explanation

MOST = 1000
"""Requests that are remembered."""


class _Request(NamedTuple):
    names: Collection[str]
    reports: list[dict[str, Any]]  # one per prompt


class Recent:
    """Reports of the requests that ended last, by every name that they have. Event loop's thread
    only."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # by unique name
        self._names: dict[str, str] = {}  # name -> the unique name of its request

    async def watch(self, names: Collection[str], replies: Replies) -> Replies:
        """Yield ``replies``, and remember what the last one to each prompt reports.

        ``names``: of the HTTP request; the first is unique.
        """
        first = next(iter(names))
        try:
            async for reply in replies:
                if isinstance(reply, Finished):
                    self._note(first, names, reply)
                yield reply
        finally:
            await replies.aclose()

    def find(self, name: str) -> list[dict[str, Any]] | None:
        """A report per prompt of the request of this name; None: it is not known, or no more."""
        unique = self._names.get(name)
        return None if unique is None else self._requests[unique].reports

    def _note(self, unique: str, names: Collection[str], reply: Finished) -> None:
        if unique not in self._requests:
            self._requests[unique] = _Request(names, [])
            self._names |= dict.fromkeys(names, unique)
        self._requests[unique].reports.append(explanation(reply))
        while len(self._requests) > MOST:
            oldest, gone = self._requests.popitem(last=False)
            for name in gone.names:
                if self._names.get(name) == oldest:
                    del self._names[name]


def routes(recent: Recent) -> APIRouter:
    """The endpoint."""
    router = APIRouter(tags=["admin"])

    @router.get("/cache/explain/{name}")
    async def explain(name: str) -> dict[str, Any]:
        """Where the prefix hit of a recent request came from. ``name``: its id, rid, or request id.

        A report per prompt: tokens by tier, the group whose missing pages ended the hit, tokens
        that were faster to compute than to load, bytes loaded, waits, and accept length.
        """
        if (reports := recent.find(name)) is None:
            raise HTTPException(404, f"none of the last {MOST} requests is called {name!r}")
        return {"id": name, "requests": reports}

    return router
