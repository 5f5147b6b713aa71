"""kvkeep.server.tracing: spans of requests, for OpenTelemetry."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine, FakeTokenizer
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvkeep.engine.client import EngineClient
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.messages import Usage
from kvkeep.schema import ConfigError
from kvkeep.server import tracing
from kvkeep.server.app import create_app
from kvkeep.server.config import ApiConfig, ServerConfig

pytestmark = pytest.mark.anyio

COMPLETIONS, COLLECTOR = "/v1/completions", "http://127.0.0.1:9/v1/traces"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def traced(
    engine: FakeEngine,
    memory: InMemorySpanExporter,
    anyio_backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose spans are kept in memory."""
    monkeypatch.setattr(tracing, "exporting", lambda endpoint: SimpleSpanProcessor(memory))
    api = ApiConfig(otlp_traces_endpoint=COLLECTOR)
    config = ServerConfig(engine=EngineConfig(model=Path("fake")), api=api)
    app = create_app(EngineClient(engine), FakeTokenizer(), config)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as client:
        yield client


def by_name(memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in memory.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_span_per_request_and_its_phases(
    traced: httpx.AsyncClient, memory: InMemorySpanExporter, stream: bool
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    body = {"prompt": "ab", "max_tokens": 3, "stream": stream}
    await traced.post(COMPLETIONS, json=body, headers=headers)
    spans = by_name(memory)
    assert list(spans) == ["queue", "prefill", "decode", f"POST {COMPLETIONS}"]
    *phases, whole = spans.values()
    assert whole.kind == SpanKind.SERVER
    assert whole.parent
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.attributes
    assert whole.attributes["kvkeep.request_id"] == "mine"
    assert whole.attributes["kvkeep.outcome"] == "finished"
    assert whole.attributes["gen_ai.usage.input_tokens"] == 2
    assert whole.attributes["gen_ai.usage.output_tokens"] == 3
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    for phase in phases:
        assert phase.parent == whole.context
    hit = spans["prefill"].attributes
    assert hit
    assert [hit[f"kvkeep.hit_tokens.{tier}"] for tier in ("device", "host", "storage")] == [2, 1, 0]
    assert (hit["kvkeep.tier_of_hit"], hit["kvkeep.limited_by"]) == ("host", "draft")
    assert (spans["decode"].attributes or {})["kvkeep.accept_length"] == 1.5


async def test_phases_follow_each_other(
    traced: httpx.AsyncClient,
    engine: FakeEngine,
    memory: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"wait_ms": 5.0, "load_ms": 2.0, "ttft_ms": 20.0, "decode_ms": 40.0}
    monkeypatch.setattr("fake_engine.Usage", lambda **said: Usage(**said, **times, loaded_bytes=64))
    await traced.post(COMPLETIONS, json={"prompt": "a"})
    spans = by_name(memory)
    begin = spans[f"POST {COMPLETIONS}"].start_time or 0
    found = {
        name: [round(((at or 0) - begin) / 1e6, 3) for at in (span.start_time, span.end_time)]
        for name, span in spans.items()
        if not name.startswith("POST")
    }
    assert found == {"queue": [0, 5], "load": [5, 7], "prefill": [5, 20], "decode": [20, 60]}
    assert (spans["load"].attributes or {})["kvkeep.loaded_bytes"] == 64


async def test_without_a_caller_s_trace_a_new_one_begins(
    traced: httpx.AsyncClient, memory: InMemorySpanExporter
) -> None:
    for header in ("", "nonsense", f"00-{TRACE}-{PARENT}-00"):
        await traced.post(COMPLETIONS, json={"prompt": "a"}, headers={"traceparent": header})
    spans = [span for span in memory.get_finished_spans() if span.kind == SpanKind.SERVER]
    assert [span.parent for span in spans] == [None, None], "the third caller samples no traces"


async def test_a_request_that_fails(
    traced: httpx.AsyncClient, engine: FakeEngine, memory: InMemorySpanExporter
) -> None:
    engine.failure, engine.fail_after = ("StoreError", "gone"), 1
    await traced.post(COMPLETIONS, json={"prompt": "a"})
    (span,) = memory.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "gone")
    assert (span.attributes or {})["kvkeep.outcome"] == "error"
    assert span.events[0].name == "exception"


def test_spans_go_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        processor = tracing.exporting(f"http://127.0.0.1:{server.server_port}/v1/traces")
        tracing.Tracing(processor, "m")._tracer.start_span("hello").end()
        processor.shutdown()
        server.shutdown()
        thread.join()
    ((path, body),) = got
    assert path == "/v1/traces"
    assert b"hello" in body
    assert b"kvkeep" in body


def test_what_the_setting_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("", "127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://"):
        with pytest.raises(ConfigError, match="must be a URL such as"):
            ApiConfig(otlp_traces_endpoint=wrong)
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"pip install 'kvkeep\[otel\]'"):
        ApiConfig(otlp_traces_endpoint=COLLECTOR)
