"""Prometheus metrics: the engine's figures, and latencies measured at the HTTP server."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import cast

from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute

from ..engine.client import Piece
from ..engine.messages import TIERS, Finished
from .figures import HELP, ZEROS

PREFIX = "kvkeep"
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
OUTCOMES = ("stop", "length", "abort", "error", "disconnect")
STATUSES = (200, 400, 401, 404, 408, 413, 429, 499, 500, 503, 504)  # of endpoints that generate
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
        self._first = self._seconds("time_to_first_token", "From the request to its first token")
        self._each = self._seconds("time_per_output_token", "Mean time per token after the first")
        self._rounds, self._accepted = 0, 0.0  # speculative rounds, and the tokens they brought
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
            for status in STATUSES if generates else (200,):
                self._responses.labels(route.path, str(status))
            for outcome in OUTCOMES if generates else ():
                self._requests.labels(route.path, outcome)

    def responded(self, path: str, status: int) -> None:
        """Count a response."""
        matching = (one.path for one in self._routes if one.path_regex.fullmatch(path))
        self._responses.labels(next(matching, "other"), str(status)).inc()

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per speculative round since the start; None: there was none."""
        return self._accepted / self._rounds if self._rounds else None

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
        outcome = "disconnect"  # the consumer closed this generator early, unless set below
        try:
            async for reply in replies:
                now = time.perf_counter()
                if isinstance(reply, Finished):
                    self._finished(reply, begin, first.get(reply.id, now), now)
                    self._requests.labels(endpoint, reply.reason).inc()
                elif reply.tokens and reply.id not in first:
                    first[reply.id] = now
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
        self._first.observe(first - begin)
        self._whole.observe(now - begin)
        self._rounds += reply.usage.verify_steps
        self._accepted += reply.usage.verify_steps * (reply.usage.accept_length or 0.0)
        if reply.usage.accept_length is not None:
            self._lengths.labels(reply.usage.tier_of_hit).observe(reply.usage.accept_length)
        if reply.usage.completion_tokens > 1:
            self._each.observe((now - first) / (reply.usage.completion_tokens - 1))

    def render(self, figures: Mapping[str, float]) -> bytes:
        """All metrics in the Prometheus text format; ``figures`` are the engine's."""
        engine = CollectorRegistry()
        rounds = {
            "speculative_rounds_total": float(self._rounds),
            "speculative_tokens_total": self._accepted,
        }
        engine.register(_Figures({**ZEROS, **rounds, **figures}))
        return generate_latest(self._registry) + generate_latest(engine)


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
