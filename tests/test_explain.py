"""What a server tells about the prefix hits of recent requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from typer.testing import CliRunner

from kvkeep import cli
from kvkeep.engine.messages import Finished, Usage
from kvkeep.schema import ConfigError
from kvkeep.server import explain

EXPLAIN, COMPLETIONS = "/cache/explain/", "/v1/completions"


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """Where no test is async."""
    with httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize(
    ("cached", "tier"),
    [
        ({}, "none"),
        ({"device": 0, "host": 0, "storage": 0}, "none"),
        ({"device": 8, "host": 0, "storage": 0}, "device"),
        ({"device": 8, "host": 1, "storage": 0}, "host"),
        ({"device": 8, "host": 0, "storage": 4}, "storage"),
    ],
)
def test_the_slowest_tier(cached: dict[str, int], tier: str) -> None:
    usage = Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=cached)
    assert usage.tier_of_hit == tier


def test_a_request_is_found_by_every_name(http: httpx.Client) -> None:
    body = {"prompt": ["ab", "c"], "max_tokens": 2, "rid": "mine"}
    answer = http.post(COMPLETIONS, json=body, headers={"x-request-id": "theirs"}).json()
    found = [http.get(EXPLAIN + name).json() for name in ("mine", "theirs", answer["id"])]
    assert found[0]["requests"] == found[1]["requests"] == found[2]["requests"]
    first, second = found[0]["requests"]
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (2, 1)
    assert first["tier_of_hit"] == "host"
    assert first["cached_tokens"] == {"device": 2, "host": 1, "storage": 0}
    assert first["limited_by"] == "draft"
    assert first["accept_length"] == 1.5
    assert first.keys() >= {"loaded_bytes", "load_ms", "wait_ms", "skipped_tokens", "preemptions"}


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        (COMPLETIONS, {"prompt": ["ab", "c"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "n": 2}),
    ],
)
def test_an_answer_brings_its_explanation(
    http: httpx.Client, path: str, prompt: dict[str, object]
) -> None:
    body = {**prompt, "max_tokens": 2, "kvkeep": {"explain": True}}
    answer = http.post(path, json=body).json()
    known = http.get(EXPLAIN + answer["id"]).json()["requests"]
    assert answer["kvkeep"] == known
    assert {one["tier_of_hit"] for one in known} == {"host"}
    lines = http.post(path, json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    known = http.get(EXPLAIN + events[0]["id"]).json()["requests"]
    told = {one["choices"][0]["index"]: one["kvkeep"] for one in events if "kvkeep" in one}
    assert sorted(told.values(), key=str) == sorted(known, key=str)
    assert {index: one["id"] for index, one in told.items()} == {
        index: f"{events[0]['id']}-{index}" for index in (0, 1)
    }
    plain = http.post(path, json=body | {"kvkeep": {}}).json()["kvkeep"]
    assert "tier_of_hit" not in plain[0]


def test_one_that_nobody_knows(http: httpx.Client) -> None:
    answer = http.get(EXPLAIN + "nobody")
    assert answer.status_code == 404
    assert "nobody" in answer.json()["error"]["message"]


def test_accept_length_is_counted_by_the_tier_of_the_hit(http: httpx.Client) -> None:
    http.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 2})
    text = http.get("/metrics").text
    assert 'kvkeep_accept_length_count{tier="host"} 1.0' in text
    assert 'kvkeep_accept_length_sum{tier="host"} 1.5' in text
    for tier in ("none", "device", "storage"):
        assert f'kvkeep_accept_length_count{{tier="{tier}"}} 0.0' in text


@pytest.mark.anyio
async def test_only_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "MOST", 3)
    recent = explain.Recent()
    usage = Usage(prompt_tokens=9, completion_tokens=1, cached_tokens={})
    for number in range(5):

        async def replies(name: str = str(number)):  # type: ignore[no-untyped-def]
            yield Finished(name, "stop", usage)

        async for _ in recent.watch([f"u{number}", "same"], replies()):
            pass
    assert [bool(recent.find(f"u{number}")) for number in range(5)] == [False] * 2 + [True] * 3
    found = recent.find("same")
    assert found
    assert found[0]["id"] == "4", "the newest of a name"
    assert len(recent._names) == 4


def test_the_command(http: httpx.Client) -> None:
    http.post(COMPLETIONS, json={"prompt": "ab", "rid": "mine"})
    url = str(http.base_url)
    result = CliRunner().invoke(cli.app, ["cache", "explain", "mine", "--base-url", url])
    assert result.exit_code == 0, result.output
    assert '"host"' in result.output
    assert "limited_by" in result.output
    for arguments, message in (
        (["nobody", "--base-url", url], "nobody"),
        (["x", "--base-url", "http://127.0.0.1:9"], "refused"),
    ):
        failed = CliRunner().invoke(cli.app, ["cache", "explain", *arguments])
        assert message in str(failed.exception)


def test_the_command_on_another_kind_of_server() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}"
        failed = CliRunner().invoke(cli.app, ["cache", "explain", "x", "--base-url", url])
    assert isinstance(failed.exception, ConfigError)
    assert str(failed.exception).startswith(f"{url}{EXPLAIN}x: 501 ")
