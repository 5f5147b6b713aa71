"""Endpoints beside those that generate: kvkeep.server.info, admin, tokenize and running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeTokenizer
from fastapi import FastAPI

import kvkeep
from kvkeep.engine.client import EngineClient
from kvkeep.engine.config import GIB, EngineConfig
from kvkeep.engine.messages import Abort, Evict
from kvkeep.server.app import create_app
from kvkeep.server.config import ServerConfig
from kvkeep.settings import settings_of

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
CONFIG = ServerConfig(
    port=7, engine=EngineConfig(model=Path("models/fake"), page_size=8, host_bytes=GIB // 2)
)


@pytest.fixture
def client(engine: FakeEngine) -> EngineClient:
    return EngineClient(engine)


@pytest.fixture
def app(client: EngineClient) -> FastAPI:
    return create_app(client, FakeTokenizer(), CONFIG)


@pytest.fixture
async def http(app: FastAPI, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as client:
        yield client


async def refusal(http: httpx.AsyncClient, path: str, body: Any, status: int = 400) -> Any:
    """The error that a request gets."""
    answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


class TestInfo:
    async def test_models(self, http: httpx.AsyncClient) -> None:
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("fake", 64)
        assert model["root"] == "models/fake"
        assert (await http.get("/v1/models/fake")).json() == model
        answer = await http.get("/v1/models/org/other")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "'org/other'" in answer.json()["error"]["message"]

    async def test_version(self, http: httpx.AsyncClient) -> None:
        assert (await http.get("/version")).json() == {"version": kvkeep.__version__}

    @pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
    async def test_probes(self, http: httpx.AsyncClient, path: str) -> None:
        assert (await http.get(path)).status_code == 200
        answer = await http.head(path)
        assert (answer.status_code, answer.text) == (200, "")

    async def test_what_a_closed_engine_means(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.close()
        statuses = [(await http.get(path)).status_code for path in ("/health", "/ping")]
        assert statuses == [503, 200]

    async def test_a_server_that_drains_is_healthy_and_not_ready(
        self, http: httpx.AsyncClient, client: EngineClient
    ) -> None:
        client.drain()
        statuses = [(await http.get(path)).status_code for path in ("/health", "/ready", "/ping")]
        assert statuses == [200, 503, 200]
        assert (await http.get("/ready")).json()["error"]["type"] == "server_error"

    @pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
    async def test_model_info(self, http: httpx.AsyncClient, path: str) -> None:
        info = (await http.get(path)).json()
        assert (info["model_path"], info["tokenizer_path"]) == ("models/fake", "models/fake")
        assert (info["served_model_name"], info["is_generation"]) == ("fake", True)

    @pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
    async def test_server_info(self, http: httpx.AsyncClient, path: str) -> None:
        info = (await http.get(path)).json()
        assert info["model_path"] == "models/fake"
        assert (info["port"], info["page_size"], info["hicache_size"]) == (7, 8, 0.5)
        assert (info["context_length"], info["max_total_num_tokens"]) == (64, 1024)
        assert info["internal_states"] == [{"avg_spec_accept_length": None}]
        await http.post(COMPLETIONS, json={"prompt": "a"})
        info = (await http.get(path)).json()
        assert info["internal_states"] == [{"avg_spec_accept_length": 1.5}]

    async def test_server_info_has_every_setting(self, http: httpx.AsyncClient) -> None:
        public = (one.flags[0] for one in settings_of(ServerConfig) if not one.secret)
        names = {flag[2:].replace("-", "_") for flag in public}
        assert names <= (await http.get("/server_info")).json().keys()

    async def test_the_openapi_document(self, http: httpx.AsyncClient) -> None:
        paths = (await http.get("/openapi.json")).json()["paths"]
        assert {"/health", "/tokenize", "/abort_request", COMPLETIONS, CHAT} <= paths.keys()


class TestTokenize:
    @pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
    async def test_a_prompt(self, http: httpx.AsyncClient, path: str) -> None:
        answer = await http.post(path, json={"prompt": "abc", "model": "fake"})
        assert answer.json() == {"count": 3, "max_model_len": 64, "tokens": [97, 98, 99]}

    async def test_several_prompts(self, http: httpx.AsyncClient) -> None:
        answer = (await http.post("/tokenize", json={"prompt": ["a", "bc"]})).json()
        assert (answer["count"], answer["tokens"]) == ([1, 2], [[97], [98, 99]])

    async def test_a_chat(self, http: httpx.AsyncClient) -> None:
        for more, text in (
            ({}, "<user>hello<assistant>"),
            ({"add_generation_prompt": False}, "<user>hello"),
            ({"chat_template_kwargs": {"x": "!"}}, "<user>hello!<assistant>"),
        ):
            answer = (await http.post("/tokenize", json={"messages": HELLO} | more)).json()
            assert "".join(map(chr, answer["tokens"])) == text
            assert answer["count"] == len(text)

    async def test_special_tokens(
        self, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[bool] = []

        def encode(self: Any, text: str, special: bool) -> list[int]:
            asked.append(special)
            return [1]

        monkeypatch.setattr("kvkeep.server.tokens.Texts.encode", encode)
        for said in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            await http.post("/tokenize", json={"prompt": "a"} | said)
            await http.post("/tokenize", json={"messages": HELLO} | said)
        assert asked == [True, False, True, True, False, False]

    @pytest.mark.parametrize("path", ["/detokenize", "/v1/detokenize"])
    async def test_back(self, http: httpx.AsyncClient, path: str) -> None:
        answer = await http.post(path, json={"tokens": [97, 98]})
        assert answer.json() == {"prompt": "ab", "text": "ab"}
        assert (await http.post(path, json={"tokens": []})).json()["prompt"] == ""

    async def test_refusals(self, http: httpx.AsyncClient) -> None:
        both = {"prompt": "a", "messages": HELLO}
        for body in ({}, both):
            error = await refusal(http, "/tokenize", body)
            assert "prompt or messages must be given" in error["message"]
        assert "empty" in (await refusal(http, "/tokenize", {"prompt": ""}))["message"]
        assert "prompts" in (await refusal(http, "/tokenize", {"prompt": ["a"] * 129}))["message"]
        assert "vocabulary" in (await refusal(http, "/detokenize", {"tokens": [128]}))["message"]
        assert "context" in (await refusal(http, "/detokenize", {"tokens": [1] * 65}))["message"]
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            await refusal(http, path, body | {"model": "other"}, 404)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_flush_cache(http: httpx.AsyncClient, engine: FakeEngine, method: str) -> None:
    answer = await http.request(method, "/flush_cache")
    assert answer.json() == {"success": True, "evicted": {"device": 7, "host": 7}}
    assert [one.tier for one in engine.received if isinstance(one, Evict)] == ["device", "host"]


class TestAbort:
    async def abort(self, http: httpx.AsyncClient, **body: Any) -> int:
        answer = await http.post("/abort_request", json=body)
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["aborted"]
        return count

    async def started(self, engine: FakeEngine, count: int) -> None:
        """Wait until the engine has so many requests."""
        async with asyncio.timeout(60):
            while len(engine.generates()) < count:
                await asyncio.sleep(0.001)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("rid", ["mine", ["mine", "yours"]])
    async def test_by_rid(
        self, http: httpx.AsyncClient, engine: FakeEngine, stream: bool, rid: Any
    ) -> None:
        engine.held = True
        body = {"prompt": ["a", "bc"], "rid": rid, "stream": stream}
        mine = asyncio.create_task(http.post(COMPLETIONS, json=body))
        other = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}))
        await self.started(engine, 3)
        assert await self.abort(http, rid="nobody's") == 0
        assert await self.abort(http, rid="mine") == 1
        answer = await mine
        assert answer.status_code == 200
        assert answer.text.count('"finish_reason":"abort"') == 2
        if not stream:
            usage = answer.json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)
        aborted = {one.id for one in engine.received if isinstance(one, Abort)}
        assert aborted == {one.id for one in engine.generates() if chr(one.tokens[0]) in "ab"}
        assert not other.done()
        engine.held = False
        engine.send(Abort("wakes the engine up"))
        assert (await other).json()["choices"][0]["finish_reason"] == "length"
        assert await self.abort(http, rid="mine") == 0
        lines = (await http.get("/metrics")).text
        labels = f'{{endpoint="{COMPLETIONS}",outcome="abort"}}'
        assert f"kvkeep_http_requests_total{labels} 2.0" in lines

    async def test_all(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.held = True
        tasks = [asyncio.create_task(http.post(COMPLETIONS, json={"prompt": x})) for x in "abc"]
        await self.started(engine, 3)
        assert await self.abort(http, abort_all=True) == 3
        for answer in await asyncio.gather(*tasks):
            assert answer.json()["choices"][0]["finish_reason"] == "abort"
        assert await self.abort(http, abort_all=True) == 0

    async def test_by_the_id_of_its_response(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.held = True
        task = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "a"}))
        await self.started(engine, 1)
        name = engine.generates()[0].id.rsplit("-", 1)[0]
        assert await self.abort(http, rid=name) == 1
        assert (await task).json()["id"] == name

    async def test_the_usage_of_what_had_begun(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.step_seconds = 0.02
        body = {"prompt": "a", "max_tokens": 60, "rid": "mine"}
        task = asyncio.create_task(http.post(COMPLETIONS, json=body))
        while engine.steps < 2:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.005)
        assert await self.abort(http, rid="mine") == 1
        answer = (await task).json()
        assert 0 < answer["usage"]["completion_tokens"] < 60
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert answer["kvkeep"]["cached_tokens"] == {"device": 2, "host": 1, "storage": 0}

    async def test_it_must_name_one(self, http: httpx.AsyncClient) -> None:
        for body in ({}, {"rid": ""}, {"abort_all": False}):
            error = await refusal(http, "/abort_request", body)
            assert error["message"] == "rid must name a request, or abort_all be true"
