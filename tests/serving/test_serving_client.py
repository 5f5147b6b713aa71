"""kvkeep.bench.serving.client and answers, against a stub server"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from bench_runs import HIT, bench, figures
from stub_server import END, Reply, event, serving, streamed, whole

from kvkeep.bench.serving.answers import Answer
from kvkeep.bench.serving.client import CHAT, COMPLETIONS, Call, Target, connected
from kvkeep.schema import ConfigError


def sent(reply: Reply, call: Call | None = None, **target: Any) -> Answer:
    """What becomes of one request that a stub answers so."""

    async def work(url: str) -> Answer:
        async with connected(Target(base_url=url, **target)) as client:
            return await client.send(call or Call({"prompt": [1, 2]}, 3, 2))

    with serving(lambda path, body: reply) as stub:
        return asyncio.run(work(stub.url))


def test_an_answer_of_kvkeep() -> None:
    got = sent(Reply(streamed([5, 6, 7], 9, kvkeep=HIT | {"verify_steps": 4})))
    assert (got.text, got.tokens, got.error) == ("t5t6t7", (5, 6, 7), "")
    assert (got.prompt_tokens, got.output_tokens, got.verify_steps) == (9, 3, 4)
    assert got.tiers == {"device": 3, "host": 2, "storage": 0}
    assert (got.cached_tokens, got.accept_length) == (0, 2.5)  # usage says 0, which wins
    assert len(got.times) == 3
    assert got.start < got.times[0] <= got.times[-1] <= got.end


def test_the_first_token_is_the_first_event_with_text_or_tokens() -> None:
    opening = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    held_back = event(choices=[{"delta": {}, "token_ids": [4]}])
    thought = event(choices=[{"delta": {"reasoning_content": "hm"}}])
    said = event(choices=[{"delta": {"content": "yes"}}])
    last = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    chunks = [opening, held_back, thought, said, last, END]
    got = sent(Reply(chunks), Call({"messages": []}, 3))
    assert (got.text, got.tokens, len(got.times)) == ("hmyes", (4,), 3)


def test_tokens_are_counted_where_the_server_does_not() -> None:
    last = event(choices=[{"text": "", "finish_reason": "stop"}])
    text = [event(choices=[{"text": word}], usage=None) for word in "abcd"]
    assert sent(Reply([*text, last])).output_tokens == 4
    ids = event(choices=[{"text": "ab", "token_ids": [1, 2]}])
    got = sent(Reply([ids, last]))
    assert (got.output_tokens, got.prompt_tokens, got.cached_tokens) == (2, 2, None)


def test_an_answer_of_sglang() -> None:
    details = {"device": 3, "host": 4, "storage": 0, "storage_backend": "file"}
    meta = {"spec_accept_length": 1.5, "spec_verify_ct": 6, "id": "x"}
    body = {
        "choices": [{"text": "ab", "finish_reason": "stop", "meta_info": meta}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None},
        "sglext": {"cached_tokens_details": details},
    }
    got = sent(whole(body), stream=False)
    assert (got.text, got.ttft, got.output_tokens) == ("ab", None, 2)
    assert (got.cached_tokens, got.tiers) == (7, {"device": 3, "host": 4, "storage": 0})
    assert (got.accept_length, got.verify_steps) == (1.5, 6)


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (whole({"error": {"message": "too many"}}, 429), "HTTP 429", "too many"),
        (whole({"object": "error", "message": "old"}, 400), "HTTP 400", "old"),
        (Reply([b"<html>\n  down"], 502), "HTTP 502", "<html> down"),
        (Reply([b"\xff\xfe"], 500), "HTTP 500", "\ufffd\ufffd"),
        (Reply([event(error={"message": "lost"}), END]), "error event", "lost"),
        (Reply(streamed([1], finish=None)), "cut short", "without a finish reason"),
        (Reply(streamed([1])[:1], cut=True), "RemoteProtocolError", "incomplete"),
        (Reply([b"data: {\n\n"]), "not understood", "truncated"),
        (Reply([event(choices=[{"text": 5}])]), "not understood", "Expected `str"),
        (Reply([]), "cut short", ""),
    ],
)
def test_failures_have_kinds(reply: Reply, kind: str, message: str) -> None:
    got = sent(reply)
    assert got.error == kind
    assert message in got.message


def test_what_a_request_says() -> None:
    def requested(call: Call, **target: Any) -> tuple[str, dict[str, Any], dict[str, str]]:
        async def work(url: str) -> Answer:
            async with connected(Target(base_url=f"{url}/v1/", **target)) as client:
                return await client.send(call)

        with serving(lambda path, body: Reply(streamed([1]))) as stub:
            assert not asyncio.run(work(stub.url)).error
            return *stub.requests[0], stub.headers[-1]

    path, body, headers = requested(Call({"prompt": [1, 2], "seed": 3}, 7))
    assert (path, body) == (
        COMPLETIONS,
        {
            "model": "stub", "prompt": [1, 2], "seed": 3, "max_tokens": 7, "temperature": 0.0,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        },
    )  # fmt: skip
    assert "authorization" not in headers
    chat = Call({"messages": [{"role": "user", "content": "é"}]}, 7)
    more = {"max_tokens": 1, "min_p": 0.5}
    path, body, headers = requested(
        chat, model="m", api_key="key", stream=True, ignore_eos=False, extra_body=more
    )
    assert (path, body["model"], body["max_tokens"], body["min_p"]) == (CHAT, "m", 1, 0.5)
    assert "ignore_eos" not in body
    assert headers["authorization"] == "Bearer key"
    assert "key" not in repr(Target(api_key="key"))


def test_connections_are_used_again() -> None:
    with serving(lambda path, body: Reply(streamed([1, 2]))) as stub:

        async def work() -> None:
            async with connected(Target(base_url=stub.url, model="m")) as client:
                for _ in range(5):
                    assert not (await client.send(Call({"prompt": [1]}, 2))).error

        asyncio.run(work())
        assert len(stub.requests) == 5
        assert stub.connections == 1


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (whole({"error": {"message": "no key"}}, 401), "HTTP 401: no key"),
        (whole({"data": []}), "lists no model; --model names one"),
        (Reply([b"<html>"]), "lists no model"),
    ],
)
def test_a_server_without_a_model_is_an_error(models: Reply, message: str) -> None:
    with serving(lambda *_: whole({}), models=models) as stub, pytest.raises(ConfigError) as error:
        bench("serve", "--base-url", stub.url, "--num-prompts", 1)
    assert message in str(error.value)


def test_a_server_that_is_not_there_is_an_error_unless_its_model_is_named() -> None:
    with serving(lambda *_: whole({})) as stub:
        gone = stub.url
    with pytest.raises(ConfigError, match="does not answer"):
        bench("serve", "--base-url", gone)
    code, output = bench("serve", "--base-url", gone, "--model", "m", "--num-prompts", 2)
    assert code == 1
    assert figures(output)["ConnectError"] == "2"


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://x", "http://", "http://a:b@x", "http://x:y"])
def test_a_base_url_is_checked(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        Target(base_url=url)
