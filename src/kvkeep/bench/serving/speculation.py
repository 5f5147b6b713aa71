"""Accept lengths of servers whose answers do not report them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from .client import Client

_SAMPLE = re.compile(
    r"^vllm:spec_decode_num_(accepted_tokens|drafts)(?:_total)?(?:\{.*\})? (\S+)", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a server says of all its requests so far."""

    accepted: float = 0.0  # draft tokens, by vLLM's counters ...
    drafts: float = 0.0  # ... and verifications
    average: float | None = None  # accept length since the start, by SGLang's server_info

    def since(self, before: Speculation) -> float | None:
        """Accept length from ``before`` on, bonus token included; None: it cannot be known.

        SGLang's average is of everything since it was started, as its own benchmark reports it.
        """
        drafts = self.drafts - before.drafts
        return 1 + (self.accepted - before.accepted) / drafts if drafts > 0 else self.average


async def speculation(client: Client) -> Speculation:
    """Ask the server; what it does not say, or not as expected, stays empty."""
    totals = {"accepted_tokens": 0.0, "drafts": 0.0}
    for name, value in _SAMPLE.findall(await client.get("/metrics")):
        totals[name] += float(value)
    return Speculation(
        totals["accepted_tokens"], totals["drafts"], _average(await client.get("/server_info"))
    )


def _average(text: str) -> float | None:
    try:
        value = json.loads(text)["internal_states"][0]["avg_spec_accept_length"]
    except (ValueError, LookupError, TypeError):
        return None
    return value if isinstance(value, float | int) else None
