"""kvkeep.server.access and metrics: keys, request ids, and counts of responses."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeEngine, FakeTokenizer
from fastapi import FastAPI

from kvkeep import logs
from kvkeep.core.cache import Cache
from kvkeep.engine.client import EngineClient
from kvkeep.engine.config import EngineConfig
from kvkeep.schema import Component, ConfigError, Group, Identity, Schema
from kvkeep.server.access import ADMIN, METRICS, OPEN
from kvkeep.server.app import create_app
from kvkeep.server.config import ApiConfig, ServerConfig
from kvkeep.server.figures import HELP, ZEROS
from kvkeep.server.tokens import Texts
from kvkeep.testing.fakes import DictStore, TruthMedia

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"
SOURCE = Path(__file__).parent.parent / "src/kvkeep"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


def made(engine: FakeEngine, **keys: str) -> FastAPI:
    config = ServerConfig(engine=EngineConfig(model=Path("fake")), api=ApiConfig(**keys))
    return create_app(EngineClient(engine), FakeTokenizer(), config)


@asynccontextmanager
async def asking(engine: FakeEngine, **keys: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(made(engine, **keys), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as client:
        yield client


@pytest.fixture
async def http(engine: FakeEngine, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with asking(engine) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class TestKeys:
    NORMAL = "/v1/models"

    @pytest.mark.parametrize(
        ("keys", "given", "allowed"),
        [
            ({}, "", "normal admin metrics"),
            ({"api_key": "k"}, "", "metrics"),
            ({"api_key": "k"}, "k", "normal admin metrics"),
            ({"api_key": "k"}, "K", "metrics"),
            ({"api_key": "k"}, "kk", "metrics"),
            ({"admin_api_key": "a"}, "", "normal"),
            ({"admin_api_key": "a"}, "a", "normal admin metrics"),
            ({"api_key": "k", "admin_api_key": "a"}, "", ""),
            ({"api_key": "k", "admin_api_key": "a"}, "k", "normal"),
            ({"api_key": "k", "admin_api_key": "a"}, "a", "normal admin metrics"),
        ],
    )
    async def test_what_a_key_opens(
        self, engine: FakeEngine, keys: dict[str, str], given: str, allowed: str
    ) -> None:
        headers = bearer(given) if given else {}
        async with asking(engine, **keys) as http:
            paths = {"normal": self.NORMAL, "admin": "/flush_cache", "metrics": METRICS}
            for kind, path in paths.items():
                answer = await http.get(path, headers=headers)
                assert answer.status_code == (200 if kind in allowed else 401), path
            for path in OPEN:
                assert (await http.get(path)).status_code == 200

    @pytest.mark.parametrize(
        "header",
        [
            "",
            "k",
            "Basic k",
            "Bearer",
            "Bearer ",
            "Bearer k k",
            "Bearer \xe9",
            "Bearerk",
            "k Bearer",
        ],
    )
    async def test_what_is_no_key(self, engine: FakeEngine, header: str) -> None:
        async with asking(engine, api_key="k") as http:
            raw = [(b"authorization", header.encode("latin-1"))]
            answer = await http.post(COMPLETIONS, json={"prompt": "a"}, headers=raw)  # type: ignore[arg-type]
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert not engine.received

    async def test_the_scheme_has_no_case(self, engine: FakeEngine) -> None:
        async with asking(engine, api_key="k") as http:
            answer = await http.get(self.NORMAL, headers={"authorization": "bearer  k "})
            assert answer.status_code == 200

    async def test_every_endpoint_needs_a_key(self, engine: FakeEngine) -> None:
        async with asking(engine, api_key="k", admin_api_key="a") as http:
            document = await http.get("/openapi.json", headers=bearer("k"))
            paths = document.json()["paths"]
            assert {*ADMIN, METRICS} <= paths.keys()
            for path, methods in paths.items():
                for method in methods:
                    answer = await http.request(method, path)
                    assert (answer.status_code == 401) == (path not in OPEN), path
            for path in ("/nowhere", "/docs", "/openapi.json"):
                assert (await http.get(path)).status_code == 401

    async def test_the_official_client(self, engine: FakeEngine) -> None:
        transport = httpx.ASGITransport(made(engine, api_key="right"))
        for key, fails in (("right", False), ("wrong", True)):
            async with openai.AsyncOpenAI(
                base_url="http://kvkeep/v1",
                api_key=key,
                http_client=httpx.AsyncClient(transport=transport),
            ) as client:
                if fails:
                    with pytest.raises(openai.AuthenticationError):
                        await client.completions.create(model="fake", prompt="a")
                else:
                    assert await client.completions.create(model="fake", prompt="a")

    @pytest.mark.parametrize("key", ["", " ", "a b", "\xe9", "a\n"])
    def test_a_key_that_no_header_can_have_is_refused(self, key: str) -> None:
        for name in ("api_key", "admin_api_key"):
            with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be printable"):
                ApiConfig(**{name: key})

    async def test_nobody_is_shown_a_key(self, engine: FakeEngine) -> None:
        keys = {"api_key": "kkkk", "admin_api_key": "aaaa"}
        assert not re.search("kkkk|aaaa", repr(ApiConfig(**keys)))
        async with asking(engine, **keys) as http:
            answer = await http.get("/server_info", headers=bearer("kkkk"))
        assert not re.search("kkkk|aaaa|api_key", answer.text)

    async def test_other_origins_are_not_welcome(self, http: httpx.AsyncClient) -> None:
        for method in ("GET", "OPTIONS"):
            headers = {"origin": "http://elsewhere", "access-control-request-method": "POST"}
            answer = await http.request(method, self.NORMAL, headers=headers)
            assert not [name for name in answer.headers if name.startswith("access-control")]


class TestIds:
    async def test_a_given_id_comes_back(self, http: httpx.AsyncClient) -> None:
        for path, status in (("/ping", 200), ("/nowhere", 404)):
            answer = await http.get(path, headers={"x-request-id": "mine-1:2.3"})
            assert answer.status_code == status
            assert answer.headers["x-request-id"] == "mine-1:2.3"

    @pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "a\xe9", "[a]"])
    async def test_others_get_a_new_one(self, http: httpx.AsyncClient, given: str | None) -> None:
        raw = [] if given is None else [(b"x-request-id", given.encode("latin-1"))]
        first, second = [
            (await http.get("/ping", headers=raw)).headers["x-request-id"]  # type: ignore[arg-type]
            for _ in range(2)
        ]
        assert re.fullmatch("[0-9a-f]{32}", first)
        assert first != second

    async def test_faults_have_one_too(
        self, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Texts, "encode", lambda *_, **__: 1 / 0)
        headers = {"x-request-id": "mine"}
        answer = await http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
        assert answer.status_code == 500
        assert answer.headers["x-request-id"] == "mine"

    async def test_lines_of_the_log_have_it(
        self, http: httpx.AsyncClient, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
    ) -> None:
        root, before = logging.getLogger(), logging.getLogger().handlers[:]
        level = logging.getLogger("kvkeep").level
        root.handlers.clear()
        try:
            logs.configure(logs.Choice("INFO"))
            engine.failure, engine.fail_after = ("StoreError", "gone"), 1
            for stream in (False, True):
                body = {"prompt": "a", "stream": stream}
                headers = {"x-request-id": f"id-{stream}"}
                await http.post(COMPLETIONS, json=body, headers=headers)
            logging.getLogger("kvkeep").warning("of none")
        finally:
            root.handlers[:] = before
            logging.getLogger("kvkeep").setLevel(level)
        lines = [line for line in capsys.readouterr().err.splitlines() if "kvkeep" in line]
        assert re.sub(r"[\d.]+ s", "T s", "\n".join(lines)).splitlines() == [
            "INFO:kvkeep.server.access:id-False: POST /v1/completions: 500 in T s",
            "INFO:kvkeep.server.access:id-True: POST /v1/completions: 200 in T s",
            "WARNING:kvkeep:-: of none",
        ]

    async def test_a_path_is_no_line_of_the_log(
        self, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO, "kvkeep"):
            await http.get("/a%0AERROR:kvkeep:-: all is lost")
        (line,) = (each.getMessage() for each in caplog.records if each.name.endswith("access"))
        assert line.startswith("GET /a%0AERROR%3Akvkeep")

    async def test_it_aborts_a_request(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.held = True
        headers = {"x-request-id": "mine"}
        task = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers))
        async with asyncio.timeout(60):
            while not engine.generates():
                await asyncio.sleep(0.001)
        answer = await http.post("/abort_request", json={"rid": "mine"})
        assert answer.json() == {"aborted": 1}
        assert (await task).json()["choices"][0]["finish_reason"] == "abort"


class TestCounts:
    async def figures(self, http: httpx.AsyncClient) -> dict[str, float]:
        lines = (await http.get("/metrics")).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def test_responses_by_endpoint_and_status(self, http: httpx.AsyncClient) -> None:
        before = await self.figures(http)
        requests: list[tuple[str, str, Any, str, int]] = [
            ("POST", COMPLETIONS, {"prompt": "a"}, COMPLETIONS, 200),
            ("POST", COMPLETIONS, {"prompt": ""}, COMPLETIONS, 400),
            ("POST", COMPLETIONS, {"prompt": "a", "model": "b"}, COMPLETIONS, 404),
            ("GET", COMPLETIONS, None, COMPLETIONS, 405),
            ("GET", "/v1/models/fake", None, "/v1/models/{name:path}", 200),
            ("GET", "/v1/models/a/b", None, "/v1/models/{name:path}", 404),
            ("GET", "/some/where", None, "other", 404),
            ("GET", "/else/where", None, "other", 404),
        ]
        for method, path, body, _, status in requests:
            assert (await http.request(method, path, json=body)).status_code == status
        after = await self.figures(http)
        grown = {
            name: value - before.get(name, 0)
            for name, value in after.items()
            if name.startswith("kvkeep_http_responses_total") and value != before.get(name, 0)
        }
        expected = {f'endpoint="{one[3]}",status="{one[4]}"': 1.0 for one in requests}
        expected['endpoint="other",status="404"'] = 2.0
        expected['endpoint="/metrics",status="200"'] = 1.0
        assert grown == {
            f"kvkeep_http_responses_total{{{labels}}}": count for labels, count in expected.items()
        }

    async def test_refusals_and_faults_are_counted(
        self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Texts, "encode", lambda *_, **__: 1 / 0)
        async with asking(engine, api_key="k") as http:
            await http.post(COMPLETIONS, json={"prompt": "a"})
            await http.post(COMPLETIONS, json={"prompt": "a"}, headers=bearer("k"))
            figures = await self.figures(http)
        for status in (401, 500):
            labels = f'endpoint="{COMPLETIONS}",status="{status}"'
            assert figures[f"kvkeep_http_responses_total{{{labels}}}"] == 1.0

    async def test_series_are_there_from_the_start(self, http: httpx.AsyncClient) -> None:
        figures = await self.figures(http)
        for endpoint in (COMPLETIONS, "/v1/chat/completions"):
            for outcome in ("stop", "length", "abort", "error", "disconnect"):
                labels = f'endpoint="{endpoint}",outcome="{outcome}"'
                assert figures[f"kvkeep_http_requests_total{{{labels}}}"] == 0.0
            for status in (200, 400, 429, 500, 503):
                labels = f'endpoint="{endpoint}",status="{status}"'
                assert figures[f"kvkeep_http_responses_total{{{labels}}}"] == 0.0
        assert figures['kvkeep_http_responses_total{endpoint="/tokenize",status="200"}'] == 0.0
        assert figures['kvkeep_hit_tokens_total{tier="storage"}'] == 0.0
        assert figures["kvkeep_speculative_rounds_total"] == 0.0
        for name in ZEROS:
            assert f"kvkeep_{name}".replace("=", '="').replace("}", '"}') in figures

    async def test_accept_length(self, http: httpx.AsyncClient) -> None:
        for _ in range(2):
            await http.post(COMPLETIONS, json={"prompt": "a"})
        figures = await self.figures(http)
        rounds, tokens = (figures[f"kvkeep_speculative_{x}_total"] for x in ("rounds", "tokens"))
        assert (rounds, tokens) == (4.0, 6.0)

    def test_every_figure_of_the_engine_is_explained(self) -> None:
        places = [SOURCE / "core", SOURCE / "engine"]
        text = "".join(path.read_text() for place in places for path in place.rglob("*.py"))
        named = re.findall(r'(?:counts|figures)\[\s*f?"(\w+)|"(\w+_total)\b', text)
        names = {counted or figure for figure, counted in named} | {x for x, _ in named if x}
        schema = Schema(Identity("m"), 4, (Group("g", (Component("k", (0,), (1,), "U8"),)),))
        names |= set(re.findall(r"\b(\w+_per_second)\b", text))
        with Cache(schema, [4], [4], DictStore(), media=TruthMedia([4], [4])) as cache:
            names |= {name.split("{")[0] for name in cache.figures()}
        assert {"hit_tokens_total", "leases", "steps_total"} <= names
        assert names - HELP.keys() == set()
        assert {name.split("{")[0] for name in ZEROS} <= names

    async def test_help_is_in_words(self, http: httpx.AsyncClient) -> None:
        text = (await http.get("/metrics")).text
        for name in ZEROS:
            plain = name.split("{")[0]
            assert f"# HELP kvkeep_{plain} {HELP[plain]}\n" in text
