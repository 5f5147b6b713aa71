"""kvkeep.server.anthropic: /v1/messages by its shapes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from chat_families import HERMES, THINKING, prompt_of, served
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

MESSAGES = "/v1/messages"
ASK: dict[str, Any] = {
    "model": "fake", "max_tokens": 200, "messages": [{"role": "user", "content": "weather?"}],
}  # fmt: skip
GET = {
    "name": "get", "description": "g",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'


@pytest.fixture
async def http(engine: FakeEngine, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with served(engine, THINKING) as client:
        yield client


def events(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_a_whole_answer(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = f"<think>hm</think>I look.\n{CALL}"
    body = (await http.post(MESSAGES, json=ASK | {"tools": [GET]})).json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fake")
    assert body["id"].startswith("msg_")
    thought, text, call = body["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert call.pop("id")
    assert call == {"type": "tool_use", "name": "get", "input": {"x": 1}}
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    assert body["usage"] == {
        "input_tokens": len(prompt_of(engine)) - 8,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 8,
        "output_tokens": len(engine.script),
    }


@pytest.mark.parametrize(
    ("fields", "reason"), [({}, "end_turn"), ({"max_tokens": 2}, "max_tokens")]
)
async def test_why_it_ends(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], reason: str
) -> None:
    engine.script = "yes"
    assert (await http.post(MESSAGES, json=ASK | fields)).json()["stop_reason"] == reason


async def test_arguments_are_sent_as_the_model_wrote_them(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    """Half a surrogate pair is valid JSON, and no text that could be encoded again."""
    given = '{"x": "\\ud800", "y": 1e999}'
    engine.script = CALL.replace('{"x": 1}', given)
    answer = await http.post(MESSAGES, json=ASK | {"tools": [GET]})
    assert f'"input":{given}' in answer.text


@pytest.mark.parametrize("stride", [1, 999])
async def test_events_in_order(http: httpx.AsyncClient, engine: FakeEngine, stride: int) -> None:
    engine.script, engine.stride = f"<think>hm</think>I look.\n{CALL}\n{CALL}", stride
    asked = ASK | {"tools": [GET], "stream": True}
    start, *found, delta, stop = events((await http.post(MESSAGES, json=asked)).text)
    assert (start["type"], start["message"]["content"]) == ("message_start", [])
    assert start["message"]["usage"]["output_tokens"] == 0
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == len(engine.script)
    assert stop == {"type": "message_stop"}
    blocks: list[Any] = []
    for event in found:
        match event["type"]:
            case "content_block_start":
                blocks.append([event["content_block"]["type"], ""])
            case "content_block_delta":
                blocks[-1][1] += list(event["delta"].values())[1]
            case kind:
                assert kind == "content_block_stop"
        assert event["index"] == len(blocks) - 1
    assert [event["type"] for event in found].count("content_block_stop") == len(blocks) == 4
    assert blocks == [
        ["thinking", "hm"], ["text", "I look."], ["tool_use", '{"x": 1}'], ["tool_use", '{"x": 1}'],
    ]  # fmt: skip


async def test_a_failure_in_the_middle(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.failure, engine.fail_after = ("StoreError", "gone"), 2
    found = events((await http.post(MESSAGES, json=ASK | {"stream": True})).text)
    assert found[0]["type"] == "message_start"
    error = {"type": "api_error", "message": "gone"}
    assert found[-1] == {"type": "error", "error": error}


async def test_a_conversation_with_tools(engine: FakeEngine) -> None:
    engine.script = "It rains."
    talk = [
        *ASK["messages"],
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "get", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1",
             "content": [{"type": "text", "text": "ra", "cache_control": {"type": "ephemeral"}},
                         {"type": "text", "text": "in"}]},
            {"type": "text", "text": "so?"},
        ]},
    ]  # fmt: skip
    async with served(engine, HERMES) as http:
        asked = ASK | {"messages": talk, "system": [{"type": "text", "text": "be brief"}]}
        answer = await http.post(MESSAGES, json=asked | {"stop_sequences": ["END"], "top_k": 3})
        assert answer.status_code == 200, answer.text
        prompt = f"<system>be brief<user>weather?<assistant>I look.{CALL}<tool>rain<user>so?"
        assert prompt_of(engine).replace("\n", "") == f"{prompt}<assistant>".replace("\n", "")
        sampling = engine.generates()[-1].sampling
        assert (sampling.stop, sampling.top_k, sampling.max_tokens) == (("END",), 3, 200)
        del asked["max_tokens"]
        count = (await http.post(f"{MESSAGES}/count_tokens", json=asked)).json()
        assert count == {"input_tokens": len(prompt_of(engine))}


@pytest.mark.parametrize("name", ["stop_sequences", "stop"])
async def test_stop_sequences(http: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    """Also by the name that chats have for them."""
    assert (await http.post(MESSAGES, json=ASK | {name: ["END"]})).status_code == 200
    assert engine.generates()[-1].sampling.stop == ("END",)


@pytest.mark.parametrize(
    ("choice", "forced"),
    [({"type": "any"}, True), ({"type": "tool", "name": "get"}, True), ({"type": "auto"}, False),
     ({"type": "none"}, False)],
)  # fmt: skip
async def test_choice_of_tools(
    http: httpx.AsyncClient, engine: FakeEngine, choice: dict[str, Any], forced: bool
) -> None:
    engine.script = "ok"
    asked = ASK | {"tools": [GET], "tool_choice": choice}
    assert (await http.post(MESSAGES, json=asked)).status_code == 200
    assert (engine.generates()[-1].sampling.grammar is not None) == forced
    assert ("<tools>" in prompt_of(engine)) == (choice["type"] != "none")


@pytest.mark.parametrize(
    ("fields", "status", "kind", "text"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "claude"}, 404, "not_found_error", "not served here"),
        ({"messages": []}, 400, "invalid_request_error", "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400,
         "invalid_request_error", "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, 400, "invalid_request_error",
         "tools"),
        ({"n": 2}, 400, "invalid_request_error", "n: Input should be 1"),
        ({"lora_path": "x"}, 400, "invalid_request_error", "lora_path is not supported"),
    ],
)  # fmt: skip
async def test_errors(
    http: httpx.AsyncClient, fields: dict[str, Any], status: int, kind: str, text: str
) -> None:
    answer = await http.post(MESSAGES, json=ASK | fields)
    assert answer.status_code == status
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert text in body["error"]["message"]


async def test_keys_come_in_a_header_of_their_own(engine: FakeEngine) -> None:
    engine.script = "ok"
    async with served(engine, HERMES, api_key="k") as http:
        for key, status in (("k", 200), ("wrong", 401)):
            answer = await http.post(MESSAGES, json=ASK, headers={"x-api-key": key})
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
