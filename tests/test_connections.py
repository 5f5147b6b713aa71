"""kvkeep.server.connections: slow clients, and too many of them, on a real server."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from real_server import serving

from kvkeep.server import connections
from kvkeep.server.connections import SPARE, allow_files

pytestmark = pytest.mark.anyio

GENERATE = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
PING = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
def port(engine: FakeEngine) -> Iterator[int]:
    with serving(engine, max_body_bytes=1000, max_connections=2) as port:
        yield port


@pytest.fixture
def hasty(engine: FakeEngine) -> Iterator[int]:
    """The port of a server without patience."""
    with serving(
        engine, max_body_bytes=1000, header_timeout=0.3, keep_alive_timeout=0.3, body_timeout=0.3
    ) as port:
        yield port


async def connected(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes."""
    async with asyncio.timeout(60):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def trickled(port: int, first: bytes, then: bytes) -> tuple[int, bytes]:
    """Send ``then`` a byte at a time; how many bytes of it, and what came, until the end."""
    reader, writer = await connected(port)
    writer.write(first)
    came = asyncio.create_task(all_of(reader))
    sent = 0
    for byte in then:
        await asyncio.sleep(0.05)
        if came.done():
            break
        writer.write(bytes([byte]))
        sent += 1
    answer = await came
    writer.close()
    return sent, answer


async def metric(port: int, name: str) -> float:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        lines = (await http.get("/metrics")).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"kvkeep_{name} "))


async def until(port: int, name: str, value: float) -> None:
    async with asyncio.timeout(60):
        while await metric(port, name) != value:
            await asyncio.sleep(0.02)


class TestHeads:
    async def test_a_byte_at_a_time(self, hasty: int) -> None:
        sent, answer = await trickled(hasty, b"", PING)
        assert sent < len(PING)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert await metric(hasty, 'http_connections_cut_total{why="headers"}') == 1
        name = 'http_responses_total{endpoint="other",status="408"}'
        assert await metric(hasty, name) == 1

    @pytest.mark.parametrize("first", [b"", PING], ids=["the first", "a later one"])
    async def test_who_says_nothing(self, hasty: int, first: bytes) -> None:
        reader, writer = await connected(hasty)
        writer.write(first)
        answer = await all_of(reader)
        writer.close()
        assert answer.count(b"HTTP/1.1 ") == answer.count(b" 200 ") == bool(first)

    async def test_the_second_request_may_not_be_slower(self, hasty: int) -> None:
        sent, answer = await trickled(hasty, PING + PING[:10], PING[10:])
        assert sent < len(PING) - 10
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 408 " in answer

    async def test_a_slow_answer_is_no_slow_request(self, hasty: int, engine: FakeEngine) -> None:
        engine.step_seconds = 0.1
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{hasty}") as http:
            body = {"prompt": "a", "max_tokens": 8}
            assert (await http.post("/v1/completions", json=body)).status_code == 200

    async def test_the_rest_of_a_refused_body_is_not_read_for_ever(self, hasty: int) -> None:
        reader, writer = await connected(hasty)
        writer.write(GENERATE + b"transfer-encoding: chunked\r\n\r\n")
        sent = 0
        try:
            async with asyncio.timeout(60):
                while not reader.at_eof():
                    writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                    await writer.drain()
                    await reader.read(1)
                    sent += 1
                    await asyncio.sleep(0.01)
        except ConnectionError:
            pass
        writer.close()
        assert sent

    async def test_headers_are_bounded(self, port: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            answer = await http.get("/health", headers={"x-padding": "x" * 50_000})
            assert answer.status_code == 200
            try:
                answer = await http.get("/health", headers={"x-padding": "x" * 200_000})
            except httpx.TransportError:  # closed before the 400 could be read
                return
            assert answer.status_code == 400

    @pytest.mark.parametrize(
        "said",
        [
            b"nonsense\r\n\r\n",
            b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
            GENERATE + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
            GENERATE + b"content-length: 1\r\ncontent-length: 2\r\n\r\n",
            GENERATE + b"content-length: -1\r\n\r\n",
        ],
    )
    async def test_what_is_no_http_is_an_error_of_the_api(
        self, port: int, said: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        reader, writer = await connected(port)
        writer.write(said)
        head, _, body = (await all_of(reader)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert not [one for one in caplog.records if one.exc_info]

    async def test_a_client_that_sends_on_can_read_the_refusal(self, port: int) -> None:
        async def pieces() -> Any:
            for _ in range(1000):
                yield b"x" * 1000

        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for content in (b"x" * 1_000_000, pieces()):
                headers = {"content-type": "application/json"}
                answer = await http.post("/v1/completions", content=content, headers=headers)
                assert answer.status_code == 413
            assert (await http.get("/health")).status_code == 200


class TestReaders:
    async def test_who_does_not_read_is_cut_off_and_aborted(self, engine: FakeEngine) -> None:
        engine.step_seconds = 0.05
        body = json.dumps({"prompt": "a", "n": 100, "max_tokens": 63, "stream": True}).encode()
        with serving(engine, 4096, write_timeout=0.3) as port:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                client.connect(("127.0.0.1", port))
                client.sendall(GENERATE + b"content-length: %d\r\n\r\n" % len(body) + body)
                await until(port, 'http_connections_cut_total{why="reader"}', 1)
            name = 'http_requests_total{endpoint="/v1/completions",outcome="disconnect"}'
            await until(port, name, 1)
        assert engine.aborted()

    async def test_who_reads_slowly_gets_all(
        self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connections, "LEAST_READ", 1)
        body = json.dumps({"prompt": "a" * 60, "n": 100, "max_tokens": 4}).encode()
        with serving(engine, 4096, write_timeout=0.3, keep_alive_timeout=0.1) as port:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                client.connect(("127.0.0.1", port))
                client.sendall(GENERATE + b"content-length: %d\r\n\r\n" % len(body) + body)
                got = b""
                while part := await asyncio.to_thread(client.recv, 2048):
                    got += part
                    await asyncio.sleep(0.02)
            answer = json.loads(got.partition(b"\r\n\r\n")[2])
            assert len(answer["choices"]) == 100
            assert await metric(port, 'http_connections_cut_total{why="reader"}') == 0


class TestCrowds:
    async def test_connections_beyond_the_maximum_may_only_probe(self, port: int) -> None:
        kept = [await connected(port) for _ in range(2)]
        await until(port, "http_connections", 3)  # with that of the question
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            refused = await http.get("/v1/models")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_connections"
            assert refused.headers["retry-after"] == "1"
            assert refused.headers["connection"] == "close"
            for path in ("/ping", "/health", "/ready", "/metrics"):
                assert (await http.get(path)).status_code == 200
            for _, writer in kept:
                writer.close()
            await until(port, "http_connections", 2)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/v1/models")).status_code == 200

    async def test_far_too_many_are_closed_at_once(self, engine: FakeEngine) -> None:
        with serving(engine, max_connections=1) as port:
            kept = [await connected(port) for _ in range(SPARE + 1)]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
                with pytest.raises(httpx.TransportError):
                    await http.get("/ping")
            for _, writer in kept:
                writer.close()
            await until(port, 'http_connections_cut_total{why="crowd"}', 1)
            await until(port, "http_connections", 1)

    def test_files_for_all_connections(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limit = (100, 5000)
        given: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda _: limit)
        monkeypatch.setattr(resource, "setrlimit", lambda _, both: given.append(both))
        assert allow_files(1000) is None
        assert 1000 + SPARE < given[0][0] <= given[0][1] == 5000
        assert allow_files(10_000) == 5000
        assert given[1] == (5000, 5000)
