"""What /metrics has from the start, its documentation, and what the log says of requests."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeTokenizer
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvkeep import logs
from kvkeep.core.cache import Cache
from kvkeep.engine.client import EngineClient
from kvkeep.engine.messages import Finished, Output, Usage
from kvkeep.schema import Component, Group, Identity, Schema
from kvkeep.server import activity, admin, metrics
from kvkeep.server.activity import Activity
from kvkeep.server.app import create_app
from kvkeep.server.figures import HELP
from kvkeep.server.metrics import Metrics
from kvkeep.stores.file import FileStore
from kvkeep.testing.fakes import DictStore, TruthMedia

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parent.parent
COMPLETIONS = "/v1/completions"
UNBOUNDED = {"endpoint", "group", "le"}  # the table leaves their values out


def at_start() -> str:
    """What a server exports before its first request; its model has the groups "full", "draft"."""
    each = [(name, Component(name, (0,), (1,), "U8")) for name in ("full", "draft")]
    schema = Schema(Identity("m"), 4, tuple(Group(name, (one,)) for name, one in each))
    media = TruthMedia([4, 4], [4, 4])
    with Cache(schema, [4, 4], [4, 4], DictStore(), media=media) as cache:
        figures = cache.figures()
    figures |= dict.fromkeys(("running_requests", "waiting_requests"), 0.0)
    engine = FakeEngine()
    client = EngineClient(engine)

    async def asked() -> dict[str, float]:
        return figures

    async def scraped() -> str:
        client.figures = asked  # type: ignore[method-assign]
        transport = httpx.ASGITransport(create_app(client, FakeTokenizer()))
        async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as http:
            return (await http.get("/metrics")).text

    try:
        return asyncio.run(scraped())
    finally:
        engine.close()


@pytest.fixture(scope="module")
def page() -> str:
    return at_start()


def table(page: str) -> str:
    """All series, as docs/metrics.md lists them."""
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(text_string_to_metric_families(page), key=lambda one: one.name):
        name = family.name + ("_total" if family.type == "counter" else "")
        samples = family.samples
        labels = "; ".join(_values(label, samples) for label in samples[0].labels if label != "le")
        lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def _values(label: str, samples: list[Sample]) -> str:
    if label in UNBOUNDED:
        return f"`{label}`"
    values = dict.fromkeys(one.labels[label] for one in samples)
    shown = sorted(values) if label == "status" else values
    return f"`{label}`: {', '.join(shown)}"


class TestSeries:
    def test_the_table_lists_them_all(self, page: str) -> None:
        """The message has the table that belongs there after a change of metrics."""
        right = table(page)
        assert right in (ROOT / "docs/metrics.md").read_text(), f"docs/metrics.md needs:\n{right}"

    def test_every_figure_has_series_from_the_start(self, page: str) -> None:
        names = {one.removesuffix("_total") for one in HELP}
        exported = {one.name for one in text_string_to_metric_families(page)}
        assert {f"kvkeep_{name}" for name in names} <= exported

    def test_counters_begin_at_zero(self, page: str) -> None:
        for family in text_string_to_metric_families(page):
            if family.type == "counter":
                for one in family.samples:
                    assert one.value == 0.0, one

    def test_what_the_file_store_counts_is_known(self, page: str) -> None:
        said = (FileStore.__doc__ or "").split("``faults`` counts")[1].split("Args:")[0]
        kinds = set(re.findall(r"``(\w+)``", said))
        assert kinds == set(re.findall(r'storage_faults_total{kind="(\w+)"}', page))
        assert len(kinds) == 13


class TestScrapes:
    async def test_an_engine_that_is_gone(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.restarts = 2
        text = (await http.get("/metrics")).text
        assert "kvkeep_engine_up 1.0" in text
        assert "kvkeep_engine_restarts_total 2.0" in text
        assert "kvkeep_steps_total" in text
        engine.close()
        answer = await http.get("/metrics")
        assert answer.status_code == 200
        assert "kvkeep_engine_up 0.0" in answer.text
        assert "kvkeep_engine_restarts_total 2.0" in answer.text
        assert "kvkeep_steps_total" not in answer.text, "a zero would look like a new beginning"

    async def test_an_engine_that_hangs(
        self, http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(admin, "SCRAPE_SECONDS", 0.01)
        monkeypatch.setattr(engine, "_take", lambda message: None)
        assert "kvkeep_engine_up 0.0" in (await http.get("/metrics")).text

    async def test_times_of_a_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter((0.0, 2.0, 5.0, 6.0))  # arrival, two pieces, end
        monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

        async def replies() -> Any:
            yield Output("a", [1], 1)
            yield Output("a", [2, 3, 4], 3)
            counts = {"prompt_tokens": 9, "completion_tokens": 4, "cached_tokens": {}}
            yield Finished("a", "stop", Usage(**counts, wait_ms=500.0))

        watching = Metrics()
        async for _ in watching.watch(COMPLETIONS, replies()):
            pass
        lines = watching.render({}).decode().splitlines()
        assert "kvkeep_queue_time_seconds_sum 0.5" in lines
        assert "kvkeep_time_to_first_token_seconds_sum 2.0" in lines
        assert "kvkeep_inter_token_latency_seconds_sum 1.0" in lines
        assert "kvkeep_inter_token_latency_seconds_count 1.0" in lines
        assert "kvkeep_e2e_request_latency_seconds_sum 6.0" in lines
        assert "kvkeep_generation_tokens_total 4.0" in lines


@contextmanager
def configured(choice: logs.Choice) -> Iterator[None]:
    """As in a process that has not configured its log."""
    root, ours = logging.getLogger(), logging.getLogger("kvkeep")
    handlers, level = root.handlers[:], ours.level
    root.handlers.clear()
    try:
        logs.configure(choice)
        yield
    finally:
        logs.configure(logs.Choice())
        root.handlers[:] = handlers
        ours.setLevel(level)


class TestLog:
    async def test_a_line_per_finished_request(
        self, http: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
    ) -> None:
        body = {"prompt": ["ab", "c"], "max_tokens": 3}
        with configured(logs.Choice("INFO")):
            await http.post(COMPLETIONS, json=body, headers={"x-request-id": "mine"})
        lines = [x for x in capsys.readouterr().err.splitlines() if "request finished" in x]
        assert len(lines) == 2
        assert re.fullmatch(
            r"INFO:kvkeep.server.activity:mine: request finished: id=cmpl-\w+-0 reason=length "
            r"prompt_tokens=2 completion_tokens=3 hit_device=2 hit_host=1 hit_storage=0 "
            r"accept_length=1.5 ttft_ms=[\d.]+ e2e_ms=[\d.]+",
            lines[0],
        )

    async def test_json(self, http: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]) -> None:
        with configured(logs.Choice("INFO", "json")):
            await http.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "mine"})
            try:
                _ = 1 / 0
            except ZeroDivisionError:
                logging.getLogger("kvkeep").exception("several\nlines")
            logs.say("ready")
        found = [json.loads(x) for x in capsys.readouterr().err.splitlines()]
        ended, answered, failed, said = (x for x in found if x["logger"].startswith("kvkeep"))
        assert {"message": "request finished", "request": "mine", "level": "INFO"}.items() <= (
            ended.items()
        )
        assert (ended["reason"], ended["hit_device"], ended["accept_length"]) == ("length", 2, 1.5)
        assert answered["request"] == "mine"
        assert "ZeroDivisionError" in failed["exception"]
        assert "request" not in failed
        assert said["message"] == "ready"

    def test_another_process_logs_alike(self) -> None:
        with configured(logs.Choice("ERROR", "json")):
            assert logs.chosen() == (logging.ERROR, "json")

    async def test_throughput_while_there_is_any(
        self,
        engine: FakeEngine,
        anyio_backend: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        caplog.set_level(logging.INFO, "kvkeep")
        counts = dict.fromkeys(Metrics().counts, 0.0)
        figures = {"running_requests": 2.0, "waiting_requests": 1.0}
        client = EngineClient(engine)

        async def asked() -> dict[str, float]:
            return figures

        monkeypatch.setattr(client, "figures", asked)
        clock = iter((0.0, 10.0, 20.0, 30.0, 40.0))
        monkeypatch.setattr(activity, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        watching = Activity(client, counts)

        async def said() -> dict[str, Any] | None:
            caplog.clear()
            await watching.note()
            return next((vars(one)["fields"] for one in caplog.records), None)

        assert await said() is None, "nothing has happened"
        counts |= {"generation_tokens_total": 50, "speculative_rounds_total": 10}
        counts["speculative_tokens_total"] = 45
        hits = {"hit_tokens_total{tier=host}": 60.0, "hit_tokens_total{tier=device}": 20.0}
        figures |= hits | {"admitted_tokens_total": 100.0}
        assert await said() == {
            "running": 2,
            "queued": 1,
            "tokens_per_second": 5.0,
            "hit_rate": 0.8,
            "accept_length": 4.5,
        }
        assert await said() is None, "idle again"
        counts["generation_tokens_total"] += 20
        figures["admitted_tokens_total"] = 0.0  # another engine
        last = await said()
        assert last
        assert (last["tokens_per_second"], last["hit_rate"]) == (2.0, None)

    async def test_reports_go_on_while_there_is_no_engine(
        self, engine: FakeEngine, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(activity, "SECONDS", 0.001)
        client, counts, notes = EngineClient(engine), {"generation_tokens_total": 0.0}, 0
        watching = Activity(client, counts)
        engine.close()
        note = watching.note

        async def counted() -> None:
            nonlocal notes
            notes += 1
            counts["generation_tokens_total"] += 1
            await note()

        monkeypatch.setattr(watching, "note", counted)
        reporting = asyncio.create_task(watching.report())
        while notes < 3:
            assert not reporting.done()
            await asyncio.sleep(0.001)
        reporting.cancel()
