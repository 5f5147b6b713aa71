"""``POST /generate``, as SGLang's clients use it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def generate(http: httpx.AsyncClient, new: int = 3, **body: Any) -> Any:
    said = {"sampling_params": {"max_new_tokens": new}} | body
    answer = await http.post("/generate", json=said)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("prompt", [{"text": "abc"}, {"input_ids": [97, 98, 99]}])
async def test_one_prompt(http: httpx.AsyncClient, prompt: dict[str, Any]) -> None:
    found = await generate(http, **prompt)
    assert (found["text"], found["output_ids"]) == ("abc", [97, 98, 99])
    meta = found["meta_info"]
    assert meta.pop("e2e_latency") > 0
    assert meta.pop("id")
    assert meta == {
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 3,
        "weight_version": "default",
        "spec_verify_ct": 2,
        "spec_accept_length": 1.5,
    }


async def test_several_prompts_and_choices(http: httpx.AsyncClient) -> None:
    found = await generate(http, text=["ab", "xyz"])
    assert [one["text"] for one in found] == ["aba", "xyz"]
    found = await generate(http, text="ab", sampling_params={"max_new_tokens": 2, "n": 2})
    assert [one["text"] for one in found] == ["ab", "ab"]


async def test_names_of_parameters(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    parameters = {
        "max_new_tokens": 5,
        "min_new_tokens": 2,
        "sampling_seed": 7,
        "temperature": 0.5,
        "stop": ["z"],
        "regex": "a*",
        "skip_special_tokens": True,
    }
    await generate(http, text="ab", sampling_params=parameters, extra_key="k", priority=3)
    (request,) = engine.generates()
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (5, 2, 7)
    assert (sampling.temperature, sampling.stop) == (0.5, ("z",))
    assert sampling.grammar
    assert sampling.grammar.text == "a*"
    assert (request.namespace, request.priority) == ('["", "k"]', 3)


async def test_the_default_limit_is_sglang_s(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    await generate(http, text="ab", sampling_params={})
    assert engine.generates()[0].sampling.max_tokens == 62, "128, as far as the context goes"


async def test_streams_are_cumulative(http: httpx.AsyncClient) -> None:
    """And the first event tells how much was cached."""
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 3}, "stream": True}
    answer = await http.post("/generate", json=body)
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    found = [json.loads(event) for event in events]
    assert [one["text"] for one in found] == ["a", "ab", "abc", "abc"]
    assert [one["meta_info"]["completion_tokens"] for one in found] == [1, 2, 3, 3]
    assert found[0]["meta_info"]["cached_tokens"] == 3
    assert [bool(one["meta_info"]["finish_reason"]) for one in found] == [False] * 3 + [True]


async def test_logprobs(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    found = await generate(http, 1, text="@P", return_logprob=True, top_logprobs_num=1)
    meta = found["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 64, None]]
    assert meta["output_top_logprobs"] == [[[-0.5, 64, None]]]
    assert "input_token_logprobs" not in meta
    asked = {"return_logprob": True, "logprob_start_len": 0}
    found = await generate(http, 1, text="@P", **asked)
    assert found["text"] == "@"
    assert found["meta_info"]["input_token_logprobs"] == [[None, 64, None], [-80 / 128, 80, None]]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "text or input_ids"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"top_p": "x"}}, "top_p"),
        ({"text": ""}, "empty"),
        ({"input_ids": [-1]}, "vocabulary"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "sampling_params": {"ebnf": "root ::= x"}}, "ebnf"),
    ],
)
async def test_what_is_refused(http: httpx.AsyncClient, body: dict[str, Any], reason: str) -> None:
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]
