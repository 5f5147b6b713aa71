"""What the answers of a run say together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from .answers import Answer

Flat = dict[str, Any]
"""Figures of a run by name, as in its JSON. None: the server does not report it."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a set of measured values, which is not empty."""

    mean: float
    median: float
    p90: float
    p99: float
    quantiles: tuple[float, ...]  # 101: the least, the first percentile, ..., the greatest


def spread(values: Sequence[float]) -> Spread | None:
    """Their spread, percentiles interpolated; None: there are no values."""
    if not values:
        return None
    quantiles: list[float] = np.quantile(values, np.linspace(0, 1, 101)).tolist()
    mean = float(np.mean(values))
    return Spread(mean, quantiles[50], quantiles[90], quantiles[99], tuple(quantiles))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of one run. Names are those of SGLang's and vLLM's reports."""

    completed: int
    failed: int
    errors: Mapping[str, int]  # failures by kind
    messages: Mapping[str, str]  # the first of each kind
    duration: float  # seconds from when the first request was sent to the last answer's end
    total_input_tokens: int
    total_output_tokens: int
    concurrency: float  # mean number of requests that were running
    accept_length: float | None  # tokens per verification
    total_cached_tokens: int | None  # of prompts
    cached_tokens_by_tier: Mapping[str, int]  # empty: not reported
    cache_hit_rate: float | None  # cached tokens / prompt tokens
    spreads: Mapping[str, Spread | None] = field(repr=False)  # ttft_ms, tpot_ms, itl_ms, ...

    def flat(self) -> Flat:
        """As JSON, with rates, and with the spreads' figures side by side."""
        names = [name for name in self.__slots__ if name not in ("spreads", "messages")]
        figures: Flat = {name: getattr(self, name) for name in names}
        amounts = {
            "request_throughput": self.completed,
            "input_throughput": self.total_input_tokens,
            "output_throughput": self.total_output_tokens,
            "total_throughput": self.total_input_tokens + self.total_output_tokens,
        }
        figures |= {name: per(amount, self.duration) for name, amount in amounts.items()}
        for name, values in self.spreads.items():
            for statistic in ("mean", "median", "p90", "p99"):
                figures[f"{statistic}_{name}"] = getattr(values, statistic) if values else None
        return figures

    def quantiles(self) -> dict[str, list[float]]:
        """101 quantiles of each spread that has values."""
        return {name: list(each.quantiles) for name, each in self.spreads.items() if each}


def summarise(answers: Iterable[Answer]) -> Summary:
    """The summary of a run. Failed requests count in ``failed``, ``errors`` and ``duration`` only.

    TTFT, TPOT and ITL are those of streamed answers. An ITL is the time between two events; an
    event may bring several tokens. TPOT is the time after the first event per token that is left.
    """
    answers = list(answers)
    duration = elapsed(answers)
    good = [answer for answer in answers if not answer.error]
    bad = [answer for answer in answers if answer.error]
    latencies = [answer.latency for answer in good]
    prompt = sum(answer.prompt_tokens for answer in good)
    reported = [answer for answer in good if answer.cached_tokens is not None]
    cached = sum(answer.cached_tokens or 0 for answer in reported) if reported else None
    tiers: Counter[str] = Counter()
    for answer in good:
        tiers.update(answer.tiers)
    seconds = {
        "ttft_ms": [first for answer in good if (first := answer.ttft) is not None],
        "tpot_ms": [
            (answer.end - answer.times[0]) / (answer.output_tokens - 1)
            for answer in good
            if answer.times and answer.output_tokens > 1
        ],
        "itl_ms": [after - before for a in good for before, after in pairwise(a.times)],
        "e2e_latency_ms": latencies,
    }
    return Summary(
        completed=len(good),
        failed=len(bad),
        errors=Counter(answer.error for answer in bad),
        messages={answer.error: answer.message for answer in reversed(bad)},
        duration=duration,
        total_input_tokens=prompt,
        total_output_tokens=sum(answer.output_tokens for answer in good),
        concurrency=per(sum(latencies), duration) or 0.0,
        accept_length=_accept_length(good),
        total_cached_tokens=cached,
        cached_tokens_by_tier=dict(tiers),
        cache_hit_rate=None if cached is None else per(cached, prompt),
        spreads={name: spread([1e3 * v for v in values]) for name, values in seconds.items()},
    )


def _accept_length(answers: Sequence[Answer]) -> float | None:
    """Tokens per verification, over all of them; where those are not counted, the answers' mean."""
    lengths = [(a.accept_length, a.verify_steps) for a in answers if a.accept_length is not None]
    if not lengths:
        return None
    weights = [steps for _, steps in lengths]
    values = [length for length, _ in lengths]
    return float(np.average(values, weights=weights if all(weights) else None))


def elapsed(answers: Sequence[Answer]) -> float:
    """Seconds from when the first of them was sent to when the last one ended; 0 of none."""
    if not answers:
        return 0.0
    return max(answer.end for answer in answers) - min(answer.start for answer in answers)


def per(amount: float, of: float) -> float | None:
    """``amount / of``; None: there is nothing to divide by."""
    return amount / of if of else None
