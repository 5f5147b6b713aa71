"""kvkeep.server.limits: what one request may make the server hold and compute."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, FakeTokenizer
from pydantic import BaseModel, ValidationError
from starlette.types import Message, Receive, Scope, Send

from kvkeep.engine.client import EngineClient
from kvkeep.engine.config import EngineConfig
from kvkeep.server import limits
from kvkeep.server.anthropic import MessagesRequest
from kvkeep.server.app import create_app
from kvkeep.server.config import ApiConfig, ServerConfig
from kvkeep.server.limits import (
    MOST_LEVELS,
    MOST_MESSAGES,
    MOST_NAME,
    MOST_OBJECTS,
    MOST_STOP,
    is_deeper,
)
from kvkeep.server.native import NativeRequest
from kvkeep.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest

pytestmark = pytest.mark.anyio

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}


def configured(**limits: Any) -> ServerConfig:
    return ServerConfig(engine=EngineConfig(model=Path("fake")), api=ApiConfig(**limits))


@pytest.fixture
async def http(engine: FakeEngine, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    api = configured(max_body_bytes=100_000, body_timeout=0.2, max_prompts=3, max_stop_strings=2)
    app = create_app(EngineClient(engine), FakeTokenizer(), api)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as client:
        yield client


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = [value]
    return value


def padded(size: int) -> bytes:
    """A request's body of ``size`` bytes."""
    body = json.dumps({"prompt": "a", "user": ""}).encode()
    return body[:-2] + b"x" * (size - len(body)) + body[-2:]


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1000):
        yield body[start : start + 1000]


class TestBodies:
    @pytest.mark.parametrize(
        "chunked", [pytest.param(False, id="stated"), pytest.param(True, id="chunked")]
    )
    async def test_a_body_may_have_so_many_bytes(
        self, http: httpx.AsyncClient, engine: FakeEngine, chunked: bool
    ) -> None:
        for size, status in ((100_000, 200), (100_001, 413)):
            body = padded(size)
            content = pieces(body) if chunked else body
            answer = await http.post(COMPLETIONS, content=content, headers=JSON)
            assert answer.status_code == status
        assert "--max-body-bytes" in answer.json()["error"]["message"]
        assert len(engine.generates()) == 1

    async def test_a_large_body_is_not_read(self, engine: FakeEngine) -> None:
        """By its stated length; by what has come of it, if its length is not stated."""
        app = create_app(EngineClient(engine), FakeTokenizer(), configured(max_body_bytes=10))
        for headers, reads in (([(b"content-length", b"11")], 0), ([], 2)):
            asked, sent = 0, []

            async def receive() -> dict[str, Any]:
                nonlocal asked
                asked += 1
                return {"type": "http.request", "body": b"x" * 6, "more_body": True}

            async def send(message: Any) -> None:
                sent.append(message)  # noqa: B023

            scope = {
                "type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"",
                "headers": [(b"content-type", b"application/json"), *headers],
            }  # fmt: skip
            await app(scope, receive, send)
            assert sent[0]["status"] == 413
            assert asked == reads

    async def test_a_slow_body_is_given_up(self, http: httpx.AsyncClient) -> None:
        async def slow() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(60)

        answer = await http.post(COMPLETIONS, content=slow(), headers=JSON)
        assert answer.status_code == 408
        assert answer.json()["error"]["message"] == (
            "the body came too slowly; --body-timeout allows more"
        )

    async def test_a_body_must_come_at_a_rate(
        self, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However small its parts, each within the timeout: a body of 20 bytes in 0.4 s."""

        async def slow() -> AsyncIterator[bytes]:
            for byte in b'{"prompt": "abcdef"}':
                yield bytes([byte])
                await asyncio.sleep(0.02)

        for rate, status in ((1024, 408), (0.1, 200)):
            monkeypatch.setattr(limits, "SLOWEST", rate)
            answer = await http.post(COMPLETIONS, content=slow(), headers=JSON)
            assert answer.status_code == status

    async def test_a_slow_server_is_no_slow_client(self) -> None:
        """What has come is taken, though the time was over before the server could look."""

        async def late(scope: Scope, receive: Receive, send: Send) -> None:
            time.sleep(0.02)
            assert (await receive())["body"] == b"all"

        async def receive() -> Message:
            return {"type": "http.request", "body": b"all"}

        async def send(message: Message) -> None: ...

        config = ApiConfig(body_timeout=0.01)
        await limits.BodyLimits(late, config)({"type": "http", "headers": []}, receive, send)

    async def test_a_slow_answer_is_waited_for(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.step_seconds = 0.5
        answer = await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200


class TestNesting:
    @pytest.mark.parametrize("field", ["chat_template_kwargs", "metadata", "unknown", "messages"])
    @pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 500])
    async def test_deep_fields_are_refused_in_silence(
        self, http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, field: str, levels: int
    ) -> None:
        body = {"messages": HELLO, field: {"x": nested(levels - 1)}}
        with caplog.at_level(logging.WARNING, "kvkeep"):
            answer = await http.post(CHAT, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert f"{field} is nested deeper than 64 levels" in answer.json()["error"]["message"]
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING]

    @pytest.mark.parametrize("levels", [1_000, 10_000])
    async def test_what_the_parser_cannot_take_is_a_400(
        self, http: httpx.AsyncClient, levels: int
    ) -> None:
        for opening, closing in ('{"x":', "}"), ("[", "]"):
            deep = opening * levels + "1" + closing * levels
            body = f'{{"messages": [], "metadata": {deep}}}'
            answer = await http.post(CHAT, content=body, headers=JSON)
            assert answer.status_code == 400

    async def test_what_templates_need_is_allowed(self, http: httpx.AsyncClient) -> None:
        metadata = {"x": nested(MOST_LEVELS - 1)}
        answer = await http.post(CHAT, json={"messages": HELLO, "metadata": metadata})
        assert answer.status_code == 200

    def test_levels_are_counted(self) -> None:
        assert not is_deeper(nested(5), 5)
        assert is_deeper(nested(6), 5)
        assert not is_deeper([1, {"a": "text"}, []], 2)
        assert is_deeper([1, {"a": "text"}, []], 1)


WIDE = [  # path, body, param, part of the message
    (COMPLETIONS, {"prompt": ["a"] * 4}, "prompt", "at most 3 are allowed (--max-prompts-per"),
    (COMPLETIONS, {"prompt": [[1]] * 4}, "prompt", "has 4 prompts"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 3}, "stop", "at most 2 are allowed (--max-stop"),
    (CHAT, {"messages": HELLO, "stop": ["x"] * 3}, "stop", "has 3 strings"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * (MOST_STOP + 1)}, "stop", "at most 1024 items"),
    (COMPLETIONS, {"prompt": [1] * 65}, "prompt", "65 tokens; this model's maximum context"),
    (COMPLETIONS, {"prompt": "a", "stop": "x" * (MOST_STOP + 1)}, "stop", "than 1024 characters"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [1] * (MOST_STOP + 1)}, "stop_token_ids",
     "at most 1024"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": "x" * (MOST_NAME + 1)}, "cache_salt", "at most"),
    (COMPLETIONS, {"prompt": "a", "extra_key": "x" * (MOST_NAME + 1)}, "extra_key", "at most"),
    (COMPLETIONS, {"prompt": "a", "model": "x" * (MOST_NAME + 1)}, "model", "at most"),
    (COMPLETIONS, {"prompt": "a", "rid": ["x"] * 4}, "rid", "at most 3 are allowed"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "text"), WIDE, ids=lambda x: str(x)[:40])
async def test_wide_requests(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: Any, param: str, text: str
) -> None:
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert text in answer.json()["error"]["message"]
    assert not engine.received


ASKED = {"messages": [], "max_tokens": 1}
BAD = [{}] * 9
WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatRequest, {"messages": BAD}),
    (ChatRequest, {"messages": [{"role": "user", "content": BAD}] * 9}),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": BAD}]}),
    (ChatRequest, {"messages": [], "tools": BAD}),
    (CompletionRequest, {"prompt": "a", "rid": BAD}),
    (CompletionRequest, {"prompt": "a", "logit_bias": {str(token): "x" for token in range(9)}}),
    (CompletionRequest, {"prompt": BAD}),
    (TokenizeRequest, {"prompt": BAD}),
    (NativeRequest, {"text": BAD}),
    (NativeRequest, {"input_ids": BAD}),
    (NativeRequest, {"rid": BAD}),
    (MessagesRequest, ASKED | {"messages": BAD}),
    (MessagesRequest, ASKED | {"messages": [{"role": "user", "content": BAD}] * 9}),
    (MessagesRequest, ASKED | {"system": BAD}),
    (MessagesRequest, ASKED | {"tools": BAD}),
    (MessagesRequest, ASKED | {"stop_sequences": BAD}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG, ids=lambda x: str(x)[:60])
def test_a_list_is_refused_at_its_first_wrong_item(
    kind: type[BaseModel], body: dict[str, Any]
) -> None:
    """A megabyte of wrong ones stopped the event loop for 11 seconds to report all of them."""
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 9


def test_messages_may_not_be_too_many() -> None:
    ChatRequest.model_validate({"messages": HELLO * MOST_MESSAGES})
    with pytest.raises(ValidationError, match="at most 10000 items"):
        ChatRequest.model_validate({"messages": HELLO * (MOST_MESSAGES + 1)})


def test_messages_may_not_have_too_many_objects() -> None:
    parts = [{"type": "text", "text": "a"}] * (MOST_OBJECTS - 1)
    ChatRequest.model_validate({"messages": [{"role": "user", "content": parts}]})
    several = [{"role": "user", "content": part} for part in ([*parts, *parts[:1]], [])]
    with pytest.raises(ValidationError, match="messages has more than 30000 objects"):
        ChatRequest.model_validate({"messages": several})


async def test_as_much_as_is_allowed(http: httpx.AsyncClient) -> None:
    body = {"prompt": ["a"] * 3, "stop": ["x" * MOST_STOP] * 2, "cache_salt": "x" * MOST_NAME}
    assert (await http.post(COMPLETIONS, json=body)).status_code == 200
