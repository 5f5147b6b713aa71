"""What the log says at ``info``: a line per finished request, and one every ten seconds of work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping

from .. import logs
from ..engine.client import EngineClient
from ..engine.messages import Finished
from ..schema import KvkeepError

SECONDS = 10.0
"""Between two lines about throughput."""

logger = logging.getLogger(__name__)


def finished(reply: Finished, first: float, whole: float) -> None:
    """Log a request that finished, with TTFT and duration as the server saw them, in seconds."""
    usage = reply.usage
    counts = {
        "id": reply.id,
        "reason": reply.reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    hits = {f"hit_{tier}": tokens for tier, tokens in usage.cached_tokens.items()}
    times = {"ttft_ms": round(1e3 * first, 1), "e2e_ms": round(1e3 * whole, 1)}
    speculation = {"accept_length": usage.accept_length and round(usage.accept_length, 2)}
    logs.note(logger, "request finished", counts | hits | speculation | times)


class Activity:
    """Logs the throughput of a server while there is any. Event loop's thread only.

    Args:
        counts: the server's own counters, as they are at any time.
    """

    def __init__(self, client: EngineClient, counts: Mapping[str, float]) -> None:
        self._client, self._counts = client, counts
        self._then, self._before = time.monotonic(), dict(counts)

    async def report(self) -> None:
        """Every ``SECONDS``, log what happened in them, until cancelled."""
        while True:
            await asyncio.sleep(SECONDS)
            with contextlib.suppress(KvkeepError):  # the engine is being restarted
                await self.note()

    async def note(self) -> None:
        """Log what happened since the last call, unless nothing did."""
        then, self._then = self._then, time.monotonic()
        idle = not self._client.busy and self._counts.items() <= self._before.items()
        if idle or not logger.isEnabledFor(logging.INFO):
            return
        now = await self._client.figures()
        now = {**now, **self._counts}
        hits = [name for name in now if name.startswith("hit_tokens_total")]
        grown = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
        self._before = now
        fields = {
            "running": int(now.get("running_requests", 0)),
            "queued": int(now.get("waiting_requests", 0)),
            "tokens_per_second": grown["generation_tokens_total"] / (self._then - then),
            "hit_rate": _ratio(sum(grown[x] for x in hits), grown.get("admitted_tokens_total", 0)),
            "accept_length": _ratio(
                grown["speculative_tokens_total"], grown["speculative_rounds_total"]
            ),
        }
        logs.note(logger, "throughput", {x: y and round(y, 3) for x, y in fields.items()})


def _ratio(part: float, whole: float) -> float | None:
    """None: there was nothing, or the engine has begun anew."""
    return part / whole if whole > 0 and part >= 0 else None
