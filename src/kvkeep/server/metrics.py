"""Prometheus metrics: the engine's figures, and latencies measured at the HTTP server."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import cast

from fastapi.routing import APIRoute
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from ..engine.client import Piece
from ..engine.messages import TIERS, Finished
from .activity import finished
from .figures import HELP, ZEROS

# They are a time beside each counter, and would double the page.
disable_created_metrics()  # type: ignore[no-untyped-call]

PREFIX = "kvkeep"
_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0),
)
OUTCOMES = ("stop", "length", "abort", "error", "disconnect")
STATUSES = (200, 401, 500, 503)  # of all endpoints
MORE_STATUSES = (400, 404, 408, 413, 429, 499, 504)  # of those that generate
OTHER = "other", (401, 404)  # paths that do not exist, and what they get
CUTS = ("headers", "reader", "crowd")
_NAME = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>[^}]*)\})?")


class Metrics:
    """Counts and times requests. Each app has its own, so that apps in one process do not mix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter(
            "http_requests", "Generations by endpoint and outcome", "endpoint", "outcome"
        )
        self._responses = self._counter(
            "http_responses", "HTTP responses by endpoint and status", "endpoint", "status"
        )
        self.connections = Gauge(
            "http_connections", "Open connections", namespace=PREFIX, registry=self._registry
        )
        self.cut = self._counter(
            "http_connections_cut",
            "Connections that the server ended: late headers, late readers, too many",
            "why",
        )
        for why in CUTS:
            self.cut.labels(why)
        self._routes: list[APIRoute] = []
        for status in OTHER[1]:
            self._responses.labels(OTHER[0], str(status))
        self.counts = dict.fromkeys(
            ("generation_tokens_total", "speculative_rounds_total", "speculative_tokens_total"), 0.0
        )
        """Tokens that were sent, rounds of speculation, and tokens that those brought, so far."""
        self._queued = self._seconds("queue_time", "From the engine's receipt to the first step")
        self._first = self._seconds("time_to_first_token", "From the request to its first token")
        self._each = self._seconds("time_per_output_token", "Mean time per token after the first")
        self._gaps = self._seconds(
            "inter_token_latency", "Between two pieces of an answer, per token of the second"
        )
        self._whole = self._seconds("e2e_request_latency", "From the request to its last token")
        self._lengths = Histogram(
            "accept_length",
            "Mean tokens per speculative round of a request, by the slowest tier of its prefix hit",
            ("tier",),
            namespace=PREFIX,
            buckets=range(1, 17),
            registry=self._registry,
        )
        for tier in TIERS:
            self._lengths.labels(tier)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=PREFIX, registry=self._registry)

    def expect(self, routes: Sequence[BaseRoute]) -> None:
        """Have the series of these endpoints from the start. Other paths are one label."""
        for route in routes:
            route = cast(APIRoute, route)
            self._routes.append(route)
            generates = "generate" in route.tags
            for status in STATUSES + (MORE_STATUSES if generates else ()):
                self._responses.labels(route.path, str(status))
            for outcome in OUTCOMES if generates else ():
                self._requests.labels(route.path, outcome)

    def responded(self, path: str, status: int) -> None:
        """Count a response."""
        matching = (one.path for one in self._routes if one.path_regex.fullmatch(path))
        self._responses.labels(next(matching, OTHER[0]), str(status)).inc()

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per speculative round since the start; None: there was none."""
        rounds = self.counts["speculative_rounds_total"]
        return self.counts["speculative_tokens_total"] / rounds if rounds else None

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"{name}_seconds", text, namespace=PREFIX, buckets=_BUCKETS, registry=self._registry
        )

    async def watch(
        self, endpoint: str, replies: AsyncGenerator[Piece | Finished, None]
    ) -> AsyncGenerator[Piece | Finished, None]:
        """Yield ``replies`` unchanged while counting and timing them."""
        begin = time.perf_counter()
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        outcome = "disconnect"  # the consumer closed this generator early, unless set below
        try:
            async for reply in replies:
                now = time.perf_counter()
                if isinstance(reply, Finished):
                    self._finished(reply, begin, first.get(reply.id, now), now)
                    self._requests.labels(endpoint, reply.reason).inc()
                elif reply.tokens:
                    self.counts["generation_tokens_total"] += len(reply.tokens)
                    if reply.id in first:
                        self._gaps.observe((now - last[reply.id]) / len(reply.tokens))
                    else:
                        first[reply.id] = now
                    last[reply.id] = now
                yield reply
            outcome = ""
        except Exception:
            outcome = "error"
            raise
        finally:
            await replies.aclose()
            if outcome:
                self._requests.labels(endpoint, outcome).inc()

    def _finished(self, reply: Finished, begin: float, first: float, now: float) -> None:
        usage = reply.usage
        self._queued.observe(usage.wait_ms / 1e3)
        self._first.observe(first - begin)
        self._whole.observe(now - begin)
        self.counts["speculative_rounds_total"] += usage.verify_steps
        self.counts["speculative_tokens_total"] += usage.verify_steps * (usage.accept_length or 0)
        if usage.accept_length is not None:
            self._lengths.labels(usage.tier_of_hit).observe(usage.accept_length)
        if usage.completion_tokens > 1:
            self._each.observe((now - first) / (usage.completion_tokens - 1))
        finished(reply, first - begin, now - begin)

    def render(self, figures: Mapping[str, float] | None, restarts: int = 0) -> bytes:
        """All metrics in the Prometheus text format.

        Args:
            figures: the engine's; None: it does not answer. Then they are left out, because zeros
                would look like counters that began anew.
            restarts: of the engine.
        """
        engine = {"engine_up": float(figures is not None), "engine_restarts_total": restarts}
        registry = CollectorRegistry()
        known = {} if figures is None else {**ZEROS, **figures}
        registry.register(_Figures({**engine, **self.counts, **known}))
        return generate_latest(self._registry) + generate_latest(registry)


class _Figures(Collector):
    """Exports the engine's figures: names ending in ``_total`` as counters, others as gauges."""

    def __init__(self, figures: Mapping[str, float]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for figure, value in self._figures.items():
            if not (match := _NAME.fullmatch(figure)):
                continue
            name = f"{PREFIX}_{match['name']}"
            pairs = [pair.split("=", 1) for pair in (match["labels"] or "").split(",") if pair]
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                text = HELP.get(match["name"], match["name"])
                families[name] = kind(name, text, labels=[label for label, _ in pairs])
            families[name].add_metric([text for _, text in pairs], value)
        yield from families.values()
