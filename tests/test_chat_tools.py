"""Tools and reasoning of /v1/chat/completions, with an engine that says what a model would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from chat_families import DEEPSEEK, HERMES, LLAMA, OPENED, THINKING, prompt_of, served
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "weather?"}]}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
GET = {"type": "function", "function": {"name": "get", "description": "g", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: dict[str, Any] = {"tools": [GET, NOW]}
CALL = '<tool_call>\n{"name": "get", "arguments": {"x": 1}}\n</tool_call>'
BOTH = f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture
async def hermes(engine: FakeEngine, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    async with served(engine, HERMES) as http:
        yield http


async def post(http: httpx.AsyncClient, *bodies: dict[str, Any], **fields: Any) -> Any:
    body = {name: value for one in (ASK, *bodies, fields) for name, value in one.items()}
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(http: httpx.AsyncClient, *bodies: dict[str, Any], **fields: Any) -> list[Any]:
    """The choices of all events, and that they have what clients need."""
    body = {name: value for one in (ASK, *bodies, fields) for name, value in one.items()}
    text = (await http.post(CHAT, json=body | {"stream": True})).text
    *lines, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(line)["choices"][0] for line in lines]


def joined(choices: list[Any]) -> dict[str, Any]:
    """The message whose deltas these are, put together as OpenAI's clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "name": "", "arguments": ""})
                assert call["type"] == "function"
            else:
                assert call.keys() == {"index", "function"}
            for name, value in call["function"].items():
                message["tool_calls"][call["index"]][name] += value
    return message


class TestCalls:
    async def test_two_at_once(self, hermes: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.script = f"I look.\n{BOTH}"
        body = await post(hermes, TOOLS)
        choice = body["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I look."
        first, second = choice["message"]["tool_calls"]
        assert first["function"] == {"name": "get", "arguments": '{"x": 1}'}
        assert second["function"] == {"name": "now", "arguments": "{}"}
        assert first["type"] == "function"
        assert first["id"].startswith("call_")
        assert first["id"] != second["id"]
        assert body["usage"]["completion_tokens"] == len(engine.script)
        assert json.loads(prompt_of(engine).split("<tools>")[1].split("</tools>")[0][: -len(
            json.dumps(NOW))]) == GET  # fmt: skip

    @pytest.mark.parametrize("stride", [1, 7, 999])
    async def test_streamed(
        self, hermes: httpx.AsyncClient, engine: FakeEngine, stride: int
    ) -> None:
        engine.script, engine.stride = f"I look.\n{BOTH}", stride
        choices = await streamed(hermes, TOOLS)
        message = joined(choices)
        assert message["content"] == "I look."
        calls = [(call["name"], call["arguments"]) for call in message["tool_calls"]]
        assert calls == [("get", '{"x": 1}'), ("now", "{}")]
        assert choices[-1]["finish_reason"] == "tool_calls"
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        said = [token for choice in choices for token in choice["token_ids"]]
        assert "".join(map(chr, said)) == engine.script
        pieces = [
            call["function"]["arguments"]
            for choice in choices
            for call in choice["delta"].get("tool_calls", ())
            if call["function"]["arguments"]
        ]
        if stride == 1:
            assert pieces == [*'{"x": 1}', *"{}"]

    async def test_no_content_is_null(self, hermes: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.script = CALL
        assert (await post(hermes, TOOLS))["choices"][0]["message"]["content"] is None

    async def test_a_call_that_was_cut_is_content(
        self, hermes: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = CALL
        choice = (await post(hermes, TOOLS, max_tokens=49))["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == CALL[:49]
        assert "tool_calls" not in choice["message"]
        choices = await streamed(hermes, TOOLS, max_tokens=49)
        assert joined(choices)["content"] == CALL[:49]
        assert choices[-1]["finish_reason"] == "length"

    async def test_each_choice_has_its_own(
        self, hermes: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = CALL
        choices = (await post(hermes, TOOLS, n=2))["choices"]
        ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
        assert len(ids) == 2

    @pytest.mark.parametrize("fields", [{}, {**TOOLS, "tool_choice": "none"}])
    async def test_without_tools_text_stays_text(
        self, hermes: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]
    ) -> None:
        engine.script = CALL
        choice = (await post(hermes, fields))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert "<tools>" not in prompt_of(engine)
        assert engine.generates()[-1].sampling.grammar is None

    async def test_no_parser(self, engine: FakeEngine) -> None:
        engine.script = CALL
        async with served(engine, HERMES, tool_call_parser="none") as http:
            choice = (await post(http, TOOLS))["choices"][0]
            assert choice["message"]["content"] == CALL
            assert "<tools>" in prompt_of(engine)
            engine.script = '{"name": "get", "parameters": {"x": 7}}'
            choice = (await post(http, TOOLS, tool_choice="required"))["choices"][0]
            assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": 7}'

    async def test_one_at_most(self, hermes: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.script = BOTH
        message = (await post(hermes, TOOLS, parallel_tool_calls=False))["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["get"]
        assert '"now"' in message["content"]

    async def test_ids_as_the_template_of_mistral_wants_them(self, engine: FakeEngine) -> None:
        engine.script = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
        async with served(engine, HERMES, tool_call_parser="mistral") as http:
            (call,) = (await post(http, TOOLS))["choices"][0]["message"]["tool_calls"]
        assert len(call["id"]) == 9
        assert call["id"].isalnum()


CALLED = {"type": "function", "id": "c1", "function": {"name": "get", "arguments": '{"x": 1}'}}
TALK: list[dict[str, Any]] = [
    *ASK["messages"],
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]


async def test_the_official_client_takes_streams_of_calls(
    hermes: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.script = f"I look.\n{BOTH}"
    async with openai.AsyncOpenAI(
        base_url="http://kvkeep/v1", api_key="none", http_client=hermes
    ) as client:
        asked: Any = {"model": "fake", **ASK, **TOOLS}
        async with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type async for event in stream}
            completion = await stream.get_final_completion()
        whole = await client.chat.completions.create(**asked)
    assert "tool_calls.function.arguments.done" in kinds
    for answer in (completion, whole):
        choice = answer.choices[0]
        calls: Any = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("get", '{"x": 1}'), ("now", "{}"),
        ]  # fmt: skip


class TestHistory:
    async def test_calls_and_results(self, hermes: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.script = "It rains."
        await post(hermes, TOOLS, messages=TALK)
        assert prompt_of(engine).endswith(f"<user>weather?<assistant>{CALL}<tool>rain<assistant>")
        given = {"name": "get", "arguments": {"x": 1}}
        talk = [TALK[0], {"role": "assistant", "tool_calls": [{"function": given}]}]
        await post(hermes, messages=talk)
        assert prompt_of(engine) == f"<user>weather?<assistant>{CALL}<assistant>"

    async def test_templates_that_want_text(self, engine: FakeEngine) -> None:
        engine.script = "It rains."
        async with served(engine, DEEPSEEK) as http:
            for arguments in ('{"x": 1}', {"x": 1}):
                called = {"function": {"name": "get", "arguments": arguments}}
                talk = [TALK[0], {"role": "assistant", "tool_calls": [called]}]
                await post(http, messages=talk)
                assert 'CALL get\n```json\n{"x": 1}\n```' in prompt_of(engine)

    async def test_templates_that_ask_whether_there_are_calls(self, engine: FakeEngine) -> None:
        engine.script = "It rains."
        async with served(engine, LLAMA) as http:
            await post(http, messages=TALK)
        assert prompt_of(engine) == "<user>weather?1<tool>rain<assistant>"

    @pytest.mark.parametrize("arguments", ["{", "[1]", "7", "[" * 3000 + "]" * 3000, '{"a":' * 99])
    async def test_arguments_that_are_no_object_stay_text(
        self, hermes: httpx.AsyncClient, engine: FakeEngine, arguments: str
    ) -> None:
        engine.script = "ok"
        called = {"function": {"name": "get", "arguments": arguments}}
        talk = [TALK[0], {"role": "assistant", "tool_calls": [called]}]
        answer = await hermes.post(CHAT, json={"messages": talk})
        assert answer.status_code == (200 if len(arguments) < 1000 else 400)
        if len(arguments) < 1000:
            assert json.dumps(arguments) in prompt_of(engine)


class TestChoice:
    @pytest.mark.parametrize(
        ("fields", "param", "text"),
        [
            ({"tool_choice": "required"}, "tool_choice", "without tools"),
            ({"tool_choice": {"function": {"name": "no"}}, **TOOLS}, "tool_choice", "not in tools"),
            ({"tool_choice": "any", **TOOLS}, "tool_choice", "'none', 'auto' or 'required'"),
            ({"tools": [GET, GET]}, "tools", "two functions of one name"),
            ({"tools": [{"type": "retrieval"}]}, "tools", "function"),
            ({"tools": [{"function": {"name": "a b"}}]}, "tools", "pattern"),
            ({"tools": [NOW] * 1025}, "tools", "1024"),
            ({**TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice", "exclude"),
            ({"functions": [{}]}, "functions", "not supported"),
        ],
    )
    async def test_what_is_refused(
        self, hermes: httpx.AsyncClient, engine: FakeEngine,
        fields: dict[str, Any], param: str, text: str,
    ) -> None:  # fmt: skip
        answer = await hermes.post(CHAT, json=ASK | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert text in answer.json()["error"]["message"]
        assert not engine.generates()

    async def test_a_named_function_is_the_only_one(
        self, hermes: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = CALL
        choice = {"type": "function", "function": {"name": "now"}}
        message = (await post(hermes, TOOLS, tool_choice=choice))["choices"][0]["message"]
        assert message["content"] == CALL
        grammar = engine.generates()[-1].sampling.grammar
        assert grammar
        assert "now" in grammar.text
        assert "get" not in grammar.text
        assert '"get"' in prompt_of(engine)

    async def test_a_grammar_only_where_one_is_needed(
        self, hermes: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = "ok"
        strict = {"type": "function", "function": {**GET["function"], "strict": True}}  # type: ignore[dict-item]
        for fields, wanted in [
            (TOOLS, False), ({"tools": [strict]}, True), (TOOLS | {"tool_choice": "auto"}, False),
            (TOOLS | {"tool_choice": "required"}, True), (TOOLS | {"regex": "ok"}, True),
        ]:  # fmt: skip
            await post(hermes, fields)
            assert (engine.generates()[-1].sampling.grammar is not None) == wanted


class TestReasoning:
    SAID = f"<think>\nhm\n</think>\n\n{CALL}"

    @pytest.mark.parametrize("stride", [1, 5, 999])
    async def test_apart_from_content_and_calls(self, engine: FakeEngine, stride: int) -> None:
        engine.script, engine.stride = self.SAID, stride
        async with served(engine, THINKING) as http:
            body = await post(http, TOOLS)
            message = joined(await streamed(http, TOOLS))
        said = body["choices"][0]["message"]
        assert (said["content"], said["reasoning_content"]) == (None, "hm")
        assert said["tool_calls"][0]["function"]["name"] == "get"
        assert (message["content"], message["reasoning_content"]) == ("", "hm")
        assert message["tool_calls"][0]["name"] == "get"
        details = body["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": len("<think>\nhm\n</think>")}

    async def test_opened_by_the_prompt(self, engine: FakeEngine) -> None:
        engine.script = "hm\n</think>\n\nyes"
        async with served(engine, OPENED) as http:
            body = await post(http)
            engine.script = "hm"
            cut = (await post(http))["choices"][0]["message"]
        message = body["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("yes", "hm")
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm\n</think>")
        assert (cut["content"], cut["reasoning_content"]) == ("", "hm")

    async def test_closed_by_the_prompt(self, engine: FakeEngine) -> None:
        engine.script = "<think> is a tag"
        async with served(engine, THINKING) as http:
            body = await post(http, chat_template_kwargs={"enable_thinking": False})
        message = body["choices"][0]["message"]
        assert message["content"] == engine.script
        assert "reasoning_content" not in message
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}

    async def test_left_in_the_content(self, engine: FakeEngine) -> None:
        engine.script = self.SAID
        async with served(engine, THINKING) as http:
            message = (await post(http, TOOLS, separate_reasoning=False))["choices"][0]["message"]
        assert message["content"] == "<think>\nhm\n</think>"
        assert len(message["tool_calls"]) == 1
        assert "reasoning_content" not in message

    async def test_in_one_piece(self, engine: FakeEngine) -> None:
        engine.script = self.SAID
        async with served(engine, THINKING) as http:
            for fields, pieces in (({}, ["h", "m"]), ({"stream_reasoning": False}, ["hm"])):
                choices = await streamed(http, TOOLS, fields)
                found = [choice["delta"].get("reasoning_content") for choice in choices]
                assert [one for one in found if one] == pieces

    async def test_no_parser(self, engine: FakeEngine) -> None:
        engine.script = self.SAID
        async with served(engine, THINKING, reasoning_parser="none") as http:
            message = (await post(http))["choices"][0]["message"]
        assert message["content"] == self.SAID

    async def test_a_format_is_that_of_what_follows(self, engine: FakeEngine) -> None:
        engine.script = "hm</think>{}"
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        kinds = []
        for template in (HERMES, THINKING, OPENED):
            async with served(engine, template) as http:
                await post(http, response_format=schema)
            grammar = engine.generates()[-1].sampling.grammar
            assert grammar
            kinds.append((grammar.kind, "</think>" in grammar.text, "<think>" in grammar.text))
        assert kinds == [
            ("json_schema", False, False), ("lark", True, True), ("lark", True, False),
        ]  # fmt: skip
