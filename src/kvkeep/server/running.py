"""Requests that run, by their ids, so that an operator can abort one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..engine.client import EngineClient
from ..engine.errors import Aborted
from ..engine.messages import Finished, Generate, Usage
from .answers import Replies


@dataclass(frozen=True, slots=True)
class _Request:
    names: frozenset[str]
    unfinished: dict[str, Generate]  # by id in the engine


class Running:
    """The HTTP requests that generate. Event loop's thread only."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._requests: dict[int, _Request] = {}
        self._count = 0

    async def track(
        self, names: Sequence[str], generates: Sequence[Generate], replies: Replies
    ) -> Replies:
        """Yield ``replies`` to ``generates``; until the last, any of ``names`` aborts them.

        Aborted ones end with a :class:`Finished` for this reason, with the counts so far.
        """
        request = _Request(frozenset(names), {one.id: one for one in generates})
        tokens: Counter[str] = Counter()
        cached: dict[str, dict[str, int]] = {}  # by request, once it has begun
        self._count += 1
        key = self._count
        self._requests[key] = request
        try:
            async for reply in replies:
                if isinstance(reply, Finished):
                    del request.unfinished[reply.id]
                else:
                    tokens[reply.id] += len(reply.tokens)
                    cached |= {reply.id: reply.cached} if reply.cached else {}
                yield reply
        except Aborted:
            for name, generate in request.unfinished.items():
                usage = Usage(
                    prompt_tokens=len(generate.tokens),
                    completion_tokens=tokens[name],
                    cached_tokens=cached.get(name, {}),
                )
                yield Finished(name, "abort", usage)
        finally:
            del self._requests[key]
            await replies.aclose()

    def abort(self, name: str | None) -> int:
        """Abort the requests of this name, None: all. Returns how many there are."""
        found = [
            request
            for request in self._requests.values()
            if request.unfinished and (name is None or name in request.names)
        ]
        for request in found:
            self._client.abort(next(iter(request.unfinished)))
        return len(found)
