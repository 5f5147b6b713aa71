"""kvkeep.server, with an engine that echoes its prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import openai
import pytest
from fake_engine import VOCAB, FakeEngine, FakeTokenizer

from kvkeep.engine.client import EngineClient
from kvkeep.server.app import create_app
from kvkeep.server.fields import NEUTRAL
from kvkeep.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from kvkeep.server.tokens import Texts

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[Any]:
    """The data of each server-sent event, without the closing [DONE], which is checked."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


class TestCompletions:
    pytestmark = pytest.mark.anyio

    async def test_text(self, http: httpx.AsyncClient) -> None:
        answer = await post(http, COMPLETIONS, model="fake", prompt="abc", max_tokens=5)
        assert answer["object"] == "text_completion"
        assert answer["model"] == "fake"
        choice = answer["choices"][0]
        assert choice["text"] == "abcab"
        assert choice["token_ids"] == [97, 98, 99, 97, 98]
        assert choice["finish_reason"] == "length"
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 3},
        }

    async def test_what_kvkeep_reports(self, http: httpx.AsyncClient) -> None:
        options = {"report_proposals": True}
        report = (await post(http, COMPLETIONS, prompt="abc", kvkeep=options))["kvkeep"]
        assert report["cached_tokens"] == {"device": 2, "host": 1, "storage": 0}
        assert report["accept_length"] == 1.5
        assert report["verify_steps"] == 2
        assert report["limited_by"] == "draft"
        assert report["proposals"] == [[1, 2]]
        assert {"ttft_ms", "decode_ms"} <= report.keys()
        assert "proposals" not in (await post(http, COMPLETIONS, prompt="abc"))["kvkeep"]

    async def test_tokens_go_through_as_they_are(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        answer = await post(http, COMPLETIONS, prompt=[1, 2, 3], max_tokens=2)
        assert answer["choices"][0]["token_ids"] == [1, 2]
        assert engine.generates()[0].tokens == [1, 2, 3]

    @pytest.mark.parametrize("prompt", [["ab", "c"], [[97, 98], [99]]])
    async def test_several_prompts(self, http: httpx.AsyncClient, prompt: list[Any]) -> None:
        answer = await post(http, COMPLETIONS, prompt=prompt, max_tokens=3)
        assert [c["text"] for c in answer["choices"]] == ["aba", "ccc"]
        assert [c["index"] for c in answer["choices"]] == [0, 1]
        assert answer["usage"]["completion_tokens"] == 6
        assert len(answer["kvkeep"]) == 2

    async def test_every_parameter_reaches_the_engine(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await post(
            http, COMPLETIONS, prompt="x", temperature=0, top_p=0.5, top_k=3, seed=-4, stop="END",
            stop_token_ids=[7], ignore_eos=True, max_tokens=2, priority=7, ttl=60,
            kvkeep={"speculate": False},
        )  # fmt: skip
        (request,) = engine.generates()
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 3)
        assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (-4, ("END",), (7,))
        assert (sampling.ignore_eos, sampling.max_tokens) == (True, 2)
        assert (request.priority, request.ttl) == (7, 60.0)
        assert not request.speculate
        assert not request.report_proposals

    async def test_defaults(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        nulls = dict.fromkeys(("max_tokens", "stop", "seed", "temperature", "n", "tools"))
        await post(http, COMPLETIONS, prompt="x", user="me", n=1, logit_bias={})
        await post(http, COMPLETIONS, prompt="x", **(nulls | {"stop": ["a"]}))
        first, second = (request.sampling for request in engine.generates())
        assert (first.max_tokens, first.temperature, first.stop) == (16, 1.0, ())
        assert (second.max_tokens, second.temperature, second.stop) == (16, 1.0, ("a",))

    async def test_namespaces_do_not_mix(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        pairs = [{}, {"cache_salt": "a"}, {"extra_key": "a"}, {"cache_salt": "a", "extra_key": "b"}]
        pairs += [{"cache_salt": "ab"}, {"cache_salt": '", "a'}]
        for pair in pairs:
            await post(http, COMPLETIONS, prompt="x", max_tokens=1, **pair)
        names = [request.namespace for request in engine.generates()]
        assert names[0] == ""
        assert len(set(names)) == len(pairs)

    async def test_stream(self, http: httpx.AsyncClient) -> None:
        body = {"prompt": "ab", "max_tokens": 3, "stream": True}
        answer = await http.post(COMPLETIONS, json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *pieces, last = events(answer.text)
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == "aba"
        assert [piece["choices"][0]["token_ids"] for piece in pieces] == [[97], [98], [97]]
        assert last["choices"][0]["finish_reason"] == "length"
        assert last["kvkeep"]["accept_length"] == 1.5
        assert "usage" not in last

    async def test_stream_of_several_prompts_with_usage(self, http: httpx.AsyncClient) -> None:
        body = {"prompt": ["ab", "c"], "stream": True, "stream_options": {"include_usage": True}}
        *pieces, last = events((await http.post(COMPLETIONS, json=body)).text)
        texts = ["", ""]
        for piece in pieces:
            assert piece["usage"] is None
            texts[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
        assert texts == ["ab" * 8, "c" * 16]
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 32

    async def test_usage_in_every_event(self, http: httpx.AsyncClient) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": ["ab", "c"], "max_tokens": 2, "stream": True, "stream_options": options}
        *pieces, last = events((await http.post(COMPLETIONS, json=body)).text)
        counts: list[list[tuple[int, ...]]] = [[], []]
        for piece in pieces:
            counts[piece["choices"][0]["index"]].append(tuple(piece["usage"].values()))
            assert [*piece["usage"]] == ["prompt_tokens", "completion_tokens", "total_tokens"]
        assert counts == [[(2, 1, 3), (2, 2, 4), (2, 2, 4)], [(1, 1, 2), (1, 2, 3), (1, 2, 3)]]
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], 7)
        del options["include_usage"]
        *_, last = events((await http.post(COMPLETIONS, json=body)).text)
        assert last["choices"]


class TestFieldsOfOthers:
    """Fields that other servers know, and fields that nobody does."""

    pytestmark = pytest.mark.anyio

    GUIDELLM: Mapping[str, Any] = {
        "model": "fake", "max_tokens": 4, "stop": None, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    ROUTER: Mapping[str, Any] = {
        "model": "fake", "n": 1, "ignore_eos": False, "no_stop_trim": False,
        "continue_final_message": False, "skip_special_tokens": True, "separate_reasoning": True,
        "stream_reasoning": True, "return_hidden_states": False, "stream": False, "echo": False,
        "bootstrap_room": 7, "parallel_tool_calls": True, "session_params": None, "max_tokens": 2,
    }  # fmt: skip

    @pytest.mark.parametrize("fields", [GUIDELLM, ROUTER], ids=["guidellm", "sglang-router"])
    @pytest.mark.parametrize(
        ("path", "prompt"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})]
    )
    async def test_requests_of(
        self, http: httpx.AsyncClient, path: str, prompt: Any, fields: Mapping[str, Any]
    ) -> None:
        answer = await http.post(path, json={**fields, **prompt})
        assert answer.status_code == 200, answer.text
        assert "x-kvkeep-ignored" not in answer.headers

    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_unknown_field_is_ignored_and_named(
        self, http: httpx.AsyncClient, stream: bool
    ) -> None:
        body = {"prompt": "a", "temprature": 1, "a b": 2, "x" * 65: 3, "top.k": [], "user": "me"}
        answer = await http.post(COMPLETIONS, json=body | {"stream": stream, "min_p": 0})
        assert answer.status_code == 200
        assert answer.headers["x-kvkeep-ignored"] == "temprature, top.k"

    async def test_so_many_names_at_most(self, http: httpx.AsyncClient) -> None:
        body = {"prompt": "a"} | {f"f{number}": 0 for number in range(1000)}
        answer = await http.post(COMPLETIONS, json=body)
        assert answer.headers["x-kvkeep-ignored"].count(",") == 15

    def test_every_neutral_value_is_accepted(self) -> None:
        for name, values in NEUTRAL.items():
            chat = name in CompletionRequest.model_fields
            kind: type[GenerationRequest] = ChatRequest if chat else CompletionRequest
            prompt: dict[str, Any] = {"messages": HELLO} if chat else {"prompt": "a"}
            for value in (*values, None):
                assert not kind.model_validate(prompt | {name: value}).unknown
            with pytest.raises(ValueError, match=f"{name} is not supported"):
                kind.model_validate(prompt | {name: "something else"})

    async def test_parts_with_marks_for_other_caches(self, http: httpx.AsyncClient) -> None:
        part = {"type": "text", "text": "hey", "cache_control": {"type": "ephemeral"}}
        await post(http, CHAT, messages=[{"role": "user", "content": [part]}])

    async def test_reasoning_effort_is_a_variable_of_the_template(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await post(http, CHAT, messages=HELLO, reasoning_effort="low")
        both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
        await post(http, CHAT, messages=HELLO, **both)
        texts = ["".join(map(chr, request.tokens)) for request in engine.generates()]
        assert texts == [f"<user>hello{effort}<assistant>" for effort in ("low", "high")]


class TestChat:
    pytestmark = pytest.mark.anyio

    async def test_answer(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        answer = await post(http, CHAT, messages=HELLO, max_completion_tokens=6)
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"]["content"] == "<user>"
        assert len(engine.generates()[0].tokens) == len("<user>hello<assistant>")

    async def test_the_default_limit_is_the_rest_of_the_context(
        self, http: httpx.AsyncClient
    ) -> None:
        usage = (await post(http, CHAT, messages=HELLO))["usage"]
        assert usage["total_tokens"] == 64

    async def test_parts_and_template_variables(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "y"}]
        messages = [{"role": "user", "content": parts}]
        await post(http, CHAT, messages=messages, chat_template_kwargs={"think": "!"})
        text = "".join(map(chr, engine.generates()[0].tokens))
        assert text == "<user>hey!<assistant>"

    async def test_stream(self, http: httpx.AsyncClient) -> None:
        body = {"messages": HELLO, "max_tokens": 3, "stream": True}
        first, *pieces, last = events((await http.post(CHAT, json=body)).text)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == "<us"
        assert last["choices"][0]["delta"] == {}
        assert last["choices"][0]["finish_reason"] == "length"

    async def test_a_model_without_a_template(self, engine: FakeEngine) -> None:
        app = create_app(EngineClient(engine), FakeTokenizer(chat_template=None))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as http:
            answer = await http.post(CHAT, json={"messages": HELLO})
        assert answer.status_code == 400
        assert "chat template" in answer.json()["error"]["message"]


BAD = [  # path, body, status, param, part of the message
    (COMPLETIONS, "{", 400, None, "not valid JSON"),
    (COMPLETIONS, "[1]", 400, None, "must be a JSON object"),
    (COMPLETIONS, "", 400, None, "must be a JSON object"),
    (COMPLETIONS, '{"prompt": "a", "temperature": NaN}', 400, "temperature", "finite"),
    (COMPLETIONS, '{"prompt": "a", "temperature": -1}', 400, "temperature", "from 0 to 1000"),
    (COMPLETIONS, '{"prompt": "a", "temperature": "1"}', 400, "temperature", "valid number"),
    (COMPLETIONS, '{"prompt": "a", "ttl": -1}', 400, "ttl", "greater than or equal to 0"),
    (COMPLETIONS, '{"prompt": "a", "ttl": "5m"}', 400, "ttl", "valid number"),
    (COMPLETIONS, '{"prompt": "a", "top_p": 0}', 400, "top_p", "above 0"),
    (COMPLETIONS, '{"prompt": "a", "top_k": 0}', 400, "top_k", "at least 1"),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": -1}', 400, "max_tokens", "at least 1"),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 0}', 400, "max_tokens", "at least 1"),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": true}', 400, "max_tokens", "valid integer"),
    (COMPLETIONS, '{"prompt": "a", "seed": 9223372036854775808}', 400, "seed", "less than"),
    (COMPLETIONS, '{"prompt": "a", "stop": ["b", ""]}', 400, None, "stop string"),
    (COMPLETIONS, '{"prompt": "a", "priority": 256}', 400, "priority", "less than or equal to 255"),
    (COMPLETIONS, '{"prompt": "a", "priority": -1}', 400, "priority", "greater than or equal to 0"),
    (COMPLETIONS, '{"prompt": "a", "priority": 1.5}', 400, "priority", "valid integer"),
    (CHAT, json.dumps({"messages": HELLO, "priority": 256}), 400, "priority", "255"),
    (COMPLETIONS, '{"prompt": "a", "n": 0}', 400, "n", "greater than or equal to 1"),
    (COMPLETIONS, '{"prompt": "a", "logprobs": 21}', 400, "logprobs", "from 0 to 20"),
    (COMPLETIONS, '{"prompt": "a", "echo": 1}', 400, "echo", "valid boolean"),
    (COMPLETIONS, '{"prompt": "a", "best_of": 2}', 400, "best_of", "not supported"),
    (COMPLETIONS, '{"prompt": "a", "no_stop_trim": true}', 400, "no_stop_trim", "except as False"),
    (COMPLETIONS, '{"prompt": "a", "n": true}', 400, "n", "valid integer"),
    (COMPLETIONS, '{"prompt": "a", "json_schema": 1}', 400, "json_schema", "valid string"),
    (COMPLETIONS, '{"prompt": "a", "stream_options": {"include_usage": 1}}', 400, "stream_options",
     "valid boolean"),
    (COMPLETIONS, '{"prompt": "a", "kvkeep": {"speculat": true}}', 400, "kvkeep", "speculat"),
    (COMPLETIONS, '{"prompt": "a", "model": "gpt-4"}', 404, "model", "not served here"),
    (COMPLETIONS, '{"max_tokens": 1}', 400, "prompt", "required"),
    (COMPLETIONS, '{"prompt": null}', 400, "prompt", "required"),
    (COMPLETIONS, '{"prompt": ""}', 400, "prompt", "empty"),
    (COMPLETIONS, '{"prompt": []}', 400, "prompt", "empty"),
    (COMPLETIONS, '{"prompt": ["a", ""]}', 400, "prompt", "empty"),
    (COMPLETIONS, '{"prompt": [[]]}', 400, "prompt", "empty"),
    (COMPLETIONS, '{"prompt": [1, "a"]}', 400, "prompt", "valid string"),
    (COMPLETIONS, '{"prompt": "\\ud800"}', 400, "prompt", "Unicode"),
    (COMPLETIONS, '{"prompt": "a", "\\ud800": 1}', 400, None, "must be a JSON object"),
    (COMPLETIONS, f'{{"prompt": [1, {VOCAB}]}}', 400, "prompt", "vocabulary"),
    (COMPLETIONS, '{"prompt": [-1]}', 400, "prompt", "vocabulary"),
    (COMPLETIONS, json.dumps({"prompt": "a" * 64}), 400, "prompt", "context length is 64"),
    (COMPLETIONS, '{"prompt": "a", "max_tokens": 64}', 400, "prompt", "context length is 64"),
    (CHAT, '{"messages": []}', 400, "messages", "empty"),
    (CHAT, '{"messages": [{"role": "user"}]}', 400, "messages", "required"),
    (CHAT, json.dumps({"messages": [{"role": "nobody", "content": ""}]}), 400, "messages", "role"),
    (CHAT, json.dumps({"messages": HELLO, "tools": [{}]}), 400, "tools", "required (0.function)"),
    (CHAT, json.dumps({"messages": HELLO, "tool_choice": "required"}), 400, "tool_choice",
     "without tools"),
    (COMPLETIONS, json.dumps({"prompt": "a", "tools": [{}]}), 400, "tools", "not supported"),
    (CHAT, json.dumps({"messages": HELLO, "return_hidden_states": True}), 400,
     "return_hidden_states", "not supported, except as False"),
    (CHAT, json.dumps({"messages": HELLO, "continue_final_message": True}), 400,
     "continue_final_message", "not supported"),
    (CHAT, json.dumps({"messages": HELLO, "logprobs": 1}), 400, "logprobs", "valid boolean"),
    (CHAT, json.dumps({"messages": HELLO, "chat_template_kwargs": {"tokenize": 1}}), 400,
     "chat_template_kwargs", "must not set"),
    (CHAT, json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), 400,
     "messages", "text"),
    ("/kvkeep/evict", '{"tier": "storage"}', 400, "tier", "device"),
    ("/kvkeep/evict", '{"tier": "host", "x": 1}', 400, "x", "not a parameter"),
    ("/nowhere", "{}", 404, None, "POST /nowhere: Not Found"),
    ("/health", "{}", 405, None, "POST /health: Method Not Allowed"),
]  # fmt: skip


class TestErrors:
    pytestmark = pytest.mark.anyio

    @pytest.mark.parametrize(
        ("path", "body", "status", "param", "text"), BAD, ids=[f"{p} {b[:70]}" for p, b, *_ in BAD]
    )
    async def test_bad_requests(
        self, http: httpx.AsyncClient, engine: FakeEngine,
        path: str, body: str, status: int, param: str | None, text: str,
    ) -> None:  # fmt: skip
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert text in error["message"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert not engine.received

    async def test_codes(self, http: httpx.AsyncClient) -> None:
        bodies = {
            "model_not_found": {"prompt": "a", "model": "b"},
            "context_length_exceeded": {"prompt": "a" * 65},
        }
        for code, body in bodies.items():
            assert (await http.post(COMPLETIONS, json=body)).json()["error"]["code"] == code

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("kind", "status"),
        [("PromptTooLong", 400), ("RequestError", 400), ("Closed", 503), ("StoreError", 500)],
    )
    async def test_what_the_engine_refuses(
        self, http: httpx.AsyncClient, engine: FakeEngine, kind: str, status: int, stream: bool
    ) -> None:
        engine.failure = kind, "because"
        answer = await http.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == "because"

    async def test_a_failure_in_the_middle_of_a_stream(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.failure, engine.fail_after = ("StoreError", "gone"), 2
        answer = await http.post(COMPLETIONS, json={"prompt": "a", "stream": True})
        *_, error = events(answer.text)
        assert error["error"]["message"] == "gone"
        assert error["error"]["type"] == "server_error"

    async def test_a_closed_engine(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.close()
        assert (await http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 503
        assert (await http.get("/health")).status_code == 503

    async def test_a_fault_of_the_server(
        self, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Texts, "encode", lambda *_, **__: 1 / 0)
        answer = await http.post(COMPLETIONS, json={"prompt": "a"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"


class TestAdmin:
    pytestmark = pytest.mark.anyio

    async def test_evict(self, http: httpx.AsyncClient) -> None:
        assert (await post(http, "/kvkeep/evict", tier="host"))["evicted"] == 7

    async def test_metrics(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        await post(http, COMPLETIONS, prompt="a", max_tokens=3)
        engine.failure = "StoreError", "gone"
        await http.post(COMPLETIONS, json={"prompt": "a"})
        lines = (await http.get("/metrics")).text.splitlines()
        assert 'kvkeep_hits_total{tier="host"} 3.0' in lines
        assert 'kvkeep_hits_total{tier="device"} 4.0' in lines
        assert "# TYPE kvkeep_load gauge" in lines
        for outcome in ("length", "error"):
            labels = f'{{endpoint="/v1/completions",outcome="{outcome}"}}'
            assert f"kvkeep_http_requests_total{labels} 1.0" in lines
        for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency"):
            assert f"kvkeep_{name}_seconds_count 1.0" in lines


class TestOpenAIClient:
    """A real server and the official client."""

    @pytest.fixture
    def client(self, url: str) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            yield client

    def test_completion(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(
            model="fake", prompt="ab", max_tokens=3, extra_body={"top_k": 1}
        )
        assert answer.choices[0].text == "aba"
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        assert answer.usage.prompt_tokens_details.cached_tokens == 3

    def test_chat_stream(self, client: openai.OpenAI) -> None:
        options = {"include_usage": True}
        *chunks, last = client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=6, stream=True, stream_options=options
        )  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "<user>"
        assert last.usage.completion_tokens == 6

    def test_models(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["fake"]

    def test_errors_are_typed(self, client: openai.OpenAI, engine: FakeEngine) -> None:
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="fake", prompt="a" * 100)
        assert caught.value.code == "context_length_exceeded"
        engine.failure, engine.fail_after = ("StoreError", "gone"), 1
        with pytest.raises(openai.APIError, match="gone"):
            list(client.completions.create(model="fake", prompt="a", stream=True))

    def test_leaving_a_stream_frees_the_request(
        self, client: openai.OpenAI, engine: FakeEngine
    ) -> None:
        engine.step_seconds = 0.02
        with client.completions.create(
            model="fake", prompt="a", max_tokens=60, stream=True
        ) as stream:
            next(iter(stream))
            engine.held = True  # so that only an Abort ends the request
        assert engine.aborted()

    @pytest.mark.parametrize("stream", [False, True])
    def test_leaving_before_the_first_token_frees_the_request(
        self, client: openai.OpenAI, engine: FakeEngine, stream: bool
    ) -> None:
        engine.held = True
        patience = httpx.Timeout(60, read=0.5)
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(model="fake", prompt="a", stream=stream, timeout=patience)
        assert engine.aborted()
        assert engine.steps == 0

    def test_many_at_once(self, url: str, engine: FakeEngine) -> None:
        engine.step_seconds = 0.002

        async def run() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
                create = client.completions.create
                letters = "abcdefghijklmnopqrst"
                answers = [create(model="fake", prompt=x, max_tokens=5) for x in letters]
                return [a.choices[0].text for a in await asyncio.gather(*answers)]

        assert asyncio.run(run()) == [letter * 5 for letter in "abcdefghijklmnopqrst"]
