"""kvkeep.server.large: bodies that are parsed in a process of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from fastapi import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message

from kvkeep.server import large
from kvkeep.server.parse_json import count

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "LARGE", 0)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2.5, True, None, "\u00e9\ud800\U0001f600", 2**70, 1e300], "b": {"": {}}},
        [],
        "text",
        float("inf"),
    ],
)
def test_what_comes_back(value: Any) -> None:
    assert large.parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize("raw", [b'{"a": }', b"", b'{"a": 1} x', b'"'])
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(json.JSONDecodeError) as ours:
        large.parse(raw)
    with pytest.raises(json.JSONDecodeError) as theirs:
        json.loads(raw)
    assert (ours.value.msg, ours.value.pos) == (theirs.value.msg, theirs.value.pos)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"\xff", b"1" * 5000])
def test_what_the_parser_cannot_take(raw: bytes) -> None:
    with pytest.raises(ValueError, match="nested too deeply") as error:
        large.parse(raw)
    assert not isinstance(error.value, json.JSONDecodeError)


def test_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "MOST_VALUES", 5)
    assert large.parse(b'[1, {"a": [2]}]') == [1, {"a": [2]}]
    for raw in (b"[1, 2, 3, 4, 5]", b'[1, {"a": [2, 3]}]', b'{"a":1,"b":2,"c":3,"d":4,"e":5}'):
        with pytest.raises(HTTPException) as error:
            large.parse(raw)
        assert error.value.status_code == 413


def test_commas_in_strings_are_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "MOST_VALUES", 3)
    for value in (",,,,,", '\\",,,,,', ["\\", ",,,,"]):
        assert large.parse(json.dumps(value).encode()) == value
    with pytest.raises(json.JSONDecodeError):
        large.parse(b'"' + b'\\",' * 100_000)


def test_values_are_counted() -> None:
    assert [count(x, 9) for x in (1, [], [1], {"a": [1, {}]}, [[[]]])] == [1, 1, 2, 4, 3]
    assert count([[0] * 100] * 100, 9) > 9


def test_a_process_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("/nowhere", large.__file__):
        monkeypatch.setattr(large.sys, "executable", program)
        with pytest.raises(HTTPException) as error:
            large.parse(b"{}")
        assert error.value.status_code == 503


async def test_a_body_whose_client_is_gone_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(large, "parse", parsed.append)
    free = threading.Event()
    another = large._one.submit(free.wait)
    came: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{}"}]

    async def receive() -> Message:
        return came.pop()

    try:
        with pytest.raises(ClientDisconnect):
            async with asyncio.timeout(10):
                await large._Request({"type": "http"}, receive).json()
    finally:
        free.set()
    another.result()
    large._one.submit(int).result()
    assert parsed == []


async def test_endpoints_answer_as_with_small_bodies(
    http: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bytes]] = [
        ("/v1/completions", b'{"prompt": "ab", "max_tokens": 2}'),
        ("/v1/completions", b'{"prompt": 1}'),
        ("/v1/completions", b'{"prompt": "a", "tools": [1]}'),
        ("/v1/completions", b'{"prompt": '),
        ("/v1/completions", b"[" * 10_000),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}'),
        ("/generate", b'{"text": "ab", "sampling_params": {"max_new_tokens": 2}}'),
        ("/tokenize", b'{"prompt": "ab"}'),
        ("/detokenize", b'{"tokens": [1, "2"]}'),
    ]
    parsed: list[bytes] = []
    parse = large.parse
    monkeypatch.setattr(large, "parse", lambda raw: parsed.append(raw) or parse(raw))

    async def answers() -> list[tuple[int, Any]]:
        found = []
        for path, body in asked:
            answer = await http.post(path, content=body, headers=JSON)
            said = answer.json()
            found.append((answer.status_code, said.get("error") or sorted(said)))
        return found

    elsewhere = await answers()
    assert parsed == [body for _, body in asked]
    monkeypatch.setattr(large, "LARGE", 1 << 30)
    assert elsewhere == await answers()
