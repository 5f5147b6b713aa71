"""OpenTelemetry traces, an extra: a span per HTTP request, in the caller's trace if it names one.

::

    POST /v1/completions                     tokens, request id, outcome
      queue      from the engine's receipt to the first step
      load       if state came from the host: bytes
      prefill    up to the first token: hit tokens by tier, what ended the hit
      decode     up to the last token: rounds, accept length

A request with several prompts has these children for each. The engine measures their durations;
they are laid out from the time at which the server sent it the request.
"""

from __future__ import annotations

import os
import time
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import Request

from .. import __version__
from ..engine.messages import Finished, Usage
from .answers import Replies

_MS = 1_000_000  # nanoseconds


class Tracing:
    """Makes spans of requests; a sampler in the caller or in ``OTEL_TRACES_SAMPLER`` may skip some.

    Event loop's thread only.

    Args:
        processor: gets every span that ended.
        model: the name of the model.
    """

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        name = os.environ.get("OTEL_SERVICE_NAME", "kvkeep")
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
        provider = TracerProvider(resource=resource)  # its atexit exports what is left
        provider.add_span_processor(processor)
        self._tracer = provider.get_tracer("kvkeep", __version__)
        self._callers = TraceContextTextMapPropagator()
        self._model = model

    async def watch(self, request: Request, name: str, replies: Replies) -> Replies:
        """Yield ``replies`` to ``request`` unchanged; ``name`` is the id of its response."""
        begin = time.time_ns()
        span = self._tracer.start_span(
            f"{request.method} {request.url.path}",
            context=self._callers.extract(request.headers),
            kind=trace.SpanKind.SERVER,
            start_time=begin,
            attributes={
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": name,
                "kvkeep.request_id": request.state.request_id,
            },
        )
        within = trace.set_span_in_context(span)
        ended: list[Finished] = []
        outcome = "disconnect"  # the consumer closed this generator early, unless set below
        try:
            async for reply in replies:
                if isinstance(reply, Finished):
                    ended.append(reply)
                    self._phases(within, begin, reply)
                yield reply
            outcome = "finished"
        except Exception as error:
            outcome = "error"
            span.record_exception(error)
            span.set_status(trace.StatusCode.ERROR, str(error))
            raise
        finally:
            await replies.aclose()
            usages = [one.usage for one in ended]
            span.set_attributes(
                {
                    "gen_ai.usage.input_tokens": sum(one.prompt_tokens for one in usages),
                    "gen_ai.usage.output_tokens": sum(one.completion_tokens for one in usages),
                    "gen_ai.response.finish_reasons": [one.reason for one in ended],
                    "kvkeep.outcome": outcome,
                }
            )
            span.end()

    def _phases(self, within: Context, begin: int, reply: Finished) -> None:
        """The children of one prompt."""
        usage = reply.usage
        scheduled = begin + round(usage.wait_ms * _MS)
        first = max(scheduled, begin + round(usage.ttft_ms * _MS))
        loaded = min(first, scheduled + round(usage.load_ms * _MS))
        last = first + round(usage.decode_ms * _MS)
        phases: list[tuple[str, int, int, dict[str, Any]]] = [
            ("queue", begin, scheduled, {"kvkeep.preemptions": usage.preemptions}),
            ("load", scheduled, loaded, {"kvkeep.loaded_bytes": usage.loaded_bytes}),
            ("prefill", scheduled, first, _hit(usage)),
            ("decode", first, last, _decoding(usage)),
        ]
        for phase, start, end, found in phases:
            if phase != "load" or usage.loaded_bytes:
                attributes = {"kvkeep.prompt_id": reply.id} | found
                child = self._tracer.start_span(
                    phase, within, attributes=attributes, start_time=start
                )
                child.end(end)


def exporting(endpoint: str) -> SpanProcessor:
    """Sends spans to a collector at this URL, as OTLP over HTTP, in batches and on a thread."""
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


def _hit(usage: Usage) -> dict[str, Any]:
    hits = {f"kvkeep.hit_tokens.{tier}": n for tier, n in usage.cached_tokens.items()}
    more = {"kvkeep.tier_of_hit": usage.tier_of_hit, "kvkeep.skipped_tokens": usage.skipped_tokens}
    limits = {"kvkeep.limited_by": usage.limited_by} if usage.limited_by else {}
    return {"kvkeep.prompt_tokens": usage.prompt_tokens} | hits | more | limits


def _decoding(usage: Usage) -> dict[str, Any]:
    counts = {"kvkeep.tokens": usage.completion_tokens, "kvkeep.verify_steps": usage.verify_steps}
    length = usage.accept_length
    return counts if length is None else counts | {"kvkeep.accept_length": length}
