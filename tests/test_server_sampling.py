"""Fields of requests that say how tokens are drawn and reported."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from kvkeep.engine.messages import Grammar

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def post(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.anyio
async def test_every_field_reaches_the_engine(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    said = {
        "min_p": 0.25,
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "frequency_penalty": -0.5,
        "presence_penalty": 2.0,
    }
    for path, prompt in ((COMPLETIONS, {"prompt": "ab"}), (CHAT, {"messages": TALK})):
        await post(http, path, max_tokens=3, logit_bias={"7": -100, "0": 1.5}, **said, **prompt)
        sampling = engine.generates()[-1].sampling
        assert {name: getattr(sampling, name) for name in said} == said
        assert sampling.logit_bias == {7: -100, 0: 1.5}
        assert sampling.logprobs is None


@pytest.mark.anyio
async def test_options_of_the_cache_and_the_scheduler(
    http: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {"prompt": "ab", "no_store": True, "priority": 7, "kvkeep": {"deadline_seconds": 1.5}}
    await post(http, COMPLETIONS, **body)
    (request,) = engine.generates()
    assert (request.no_store, request.priority, request.deadline_seconds) == (True, 7, 1.5)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ("json_schema", {"type": "object"})),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            ("json_schema", SCHEMA),
        ),
        ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
        ({"json_schema": SCHEMA}, ("json_schema", SCHEMA)),
        ({"regex": "a+"}, ("regex", "a+")),
    ],
)
async def test_grammars(
    http: httpx.AsyncClient, engine: FakeEngine, said: dict[str, Any], expected: Any
) -> None:
    await post(http, CHAT, messages=TALK, max_tokens=2, **said)
    found = engine.generates()[-1].sampling.grammar
    if isinstance(found, Grammar) and found.kind == "json_schema":
        assert (found.kind, json.loads(found.text)) == expected
    else:
        assert (found and (found.kind, found.text)) == expected


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"regex": "a", "json_schema": "{}"}, "exclude each other"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"logit_bias": {"a": 1}}, "token ids as keys"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 128, "prompt": ["a", "b"]}, "at most 128"),
    ],
)
async def test_what_is_refused(http: httpx.AsyncClient, said: dict[str, Any], reason: str) -> None:
    answer = await http.post(COMPLETIONS, json={"prompt": "ab"} | said)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_too_many_requests(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.failure = ("Overloaded", "7 requests wait already; try again later")
    answer = await http.post(COMPLETIONS, json={"prompt": "ab"})
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["type"] == "rate_limit_error"
    engine.failure = ("DeadlineExceeded", "the request's deadline has passed")
    assert (await http.post(COMPLETIONS, json={"prompt": "ab"})).status_code == 504


class TestChoices:
    @pytest.mark.anyio
    async def test_several_of_each_prompt(
        self, http: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """A prompt counts once, and every choice has a seed of its own."""
        body = await post(http, COMPLETIONS, prompt=["abc", "xy"], n=3, max_tokens=2, seed=40)
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == ["ab", "ab", "ab", "xy", "xy", "xy"]
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert [one.sampling.seed for one in engine.generates()] == [40, 41, 42] * 2
        assert body["usage"]["prompt_tokens"] == 5
        assert body["usage"]["completion_tokens"] == 12
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 6

    @pytest.mark.anyio
    async def test_streamed(self, http: httpx.AsyncClient) -> None:
        answer = await http.post(
            CHAT, json={"messages": TALK, "n": 2, "max_tokens": 3, "stream": True}
        )
        seen = {0: 0, 1: 0}
        for event in events(answer.text):
            for choice in event["choices"]:
                seen[choice["index"]] += len(choice["token_ids"])
        assert seen == {0: 3, 1: 3}


class TestLogprobs:
    @pytest.mark.anyio
    async def test_of_a_completion(self, http: httpx.AsyncClient) -> None:
        body = await post(http, COMPLETIONS, prompt="@P", max_tokens=2, logprobs=2)
        assert body["choices"][0]["logprobs"] == {
            "tokens": ["@", "P"],
            "token_logprobs": [-64 / 128, -80 / 128],
            "top_logprobs": [
                {"@": -64 / 128, "A": -65 / 128},
                {"P": -80 / 128, "Q": -81 / 128},
            ],
            "text_offset": [0, 1],
        }

    @pytest.mark.anyio
    async def test_with_the_prompt(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        """As evaluation harnesses ask for log-likelihoods."""
        body = await post(http, COMPLETIONS, prompt="@PAQ", max_tokens=1, logprobs=1, echo=True)
        choice = body["choices"][0]
        assert choice["text"] == "@PAQ@"
        assert choice["logprobs"]["tokens"] == list("@PAQ@")
        assert choice["logprobs"]["token_logprobs"] == [None, *(-ord(c) / 128 for c in "PAQ@")]
        assert choice["logprobs"]["top_logprobs"][:2] == [None, {"P": -80 / 128}]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 1)
        assert engine.generates()[0].prompt_logprobs

    @pytest.mark.anyio
    async def test_the_prompt_without(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = await post(http, COMPLETIONS, prompt=["ab", "c"], max_tokens=2, echo=True)
        assert [choice["text"] for choice in body["choices"]] == ["abab", "ccc"]
        assert body["choices"][0]["logprobs"] is None
        assert not any(one.prompt_logprobs for one in engine.generates())

    @pytest.mark.anyio
    async def test_of_a_chat(self, http: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = await post(http, CHAT, messages=TALK, max_tokens=1, logprobs=True, top_logprobs=1)
        assert body["choices"][0]["logprobs"] == {
            "content": [
                {
                    "token": "<",
                    "logprob": -60 / 128,
                    "bytes": [60],
                    "top_logprobs": [{"token": "<", "logprob": -60 / 128, "bytes": [60]}],
                }
            ],
            "refusal": None,
        }
        await post(http, CHAT, messages=TALK, max_tokens=1, logprobs=True)
        assert engine.generates()[-1].sampling.logprobs == 0
        answer = await http.post(CHAT, json={"messages": TALK, "top_logprobs": 2})
        assert answer.status_code == 400

    @pytest.mark.anyio
    async def test_streamed_parts_make_the_whole(self, http: httpx.AsyncClient) -> None:
        asked = {"prompt": "@PA", "max_tokens": 3, "logprobs": 1, "echo": True}
        whole = await post(http, COMPLETIONS, **asked)
        answer = await http.post(COMPLETIONS, json=asked | {"stream": True})
        parts = [e["choices"][0]["logprobs"] for e in events(answer.text)]
        for name, values in whole["choices"][0]["logprobs"].items():
            assert [one for part in parts if part for one in part[name]] == values
