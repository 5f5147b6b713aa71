"""Hostile clients: ways to attack a server, each of which counts what its clients saw."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

CONNECTIONS = 400
"""That the server allows."""

GENERATES = ("/v1/completions", "/v1/chat/completions", "/generate")
MIB = 1 << 20
Statuses = Counter[str]


def request(path: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    """A POST in bytes."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if length is not None or not headers:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def completion(new: int = 8, prompt: int = 0, **more: object) -> bytes:
    """A request for ``new`` tokens after so many; 0: a random number of them."""
    tokens = [random.randrange(2, 2048) for _ in range(prompt or random.randrange(1, 200))]
    body = {"prompt": tokens, "max_tokens": new, "ignore_eos": True, **more}
    return request("/v1/completions", json.dumps(body).encode())


async def status_of(reader: asyncio.StreamReader, seconds: float = 60) -> str:
    """The status of the response that comes; "closed" if none does."""
    try:
        async with asyncio.timeout(seconds):
            line = await reader.readline()
            while line.startswith(b"HTTP/1.1 100 "):
                await reader.readline()
                line = await reader.readline()
        return line.split()[1].decode() if line else "closed"
    except ConnectionError:
        return "closed"
    except TimeoutError:
        return "no answer"


async def once(part: bytes) -> AsyncIterator[bytes]:
    """A request in one part."""
    yield part


class Attacks:
    """Ways to attack the server at ``port``. Each returns how many clients saw which status."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def each(
        self, count: int, at_once: int, one: Callable[[int], Awaitable[str]]
    ) -> Statuses:
        slots = asyncio.Semaphore(at_once)

        async def bounded(number: int) -> str:
            async with slots:
                try:
                    return await one(number)
                except ConnectionError:
                    return "closed"

        return Counter(await asyncio.gather(*map(bounded, range(count))))

    async def send(self, parts: AsyncIterator[bytes]) -> str:
        """Send until the server has enough; the status of its answer."""
        reader, writer = await self._connect()
        answer = asyncio.create_task(status_of(reader))
        try:
            async for part in parts:
                if answer.done():
                    break
                writer.write(part)
                await writer.drain()
        except ConnectionError:
            pass
        status = await answer
        writer.close()
        return status

    async def short_connections(self) -> Statuses:
        """2,000: closed at once, in the middle of a request, before the answer, reset, or whole."""

        async def one(number: int) -> str:
            reader, writer = await self._connect()
            whole = completion(4)
            kind = number % 5
            writer.write((b"", whole[:50], whole, whole, whole)[kind])
            if kind == 3:
                await asyncio.sleep(random.random() / 10)
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
            status = await status_of(reader) if kind == 4 else "left"
            writer.close()
            return status

        return await self.each(2000, 100, one)

    async def large_bodies(self) -> Statuses:
        """100 MB, stated or chunked."""

        async def one(number: int) -> str:
            path, chunk = GENERATES[number % 3], b"x" * 1_000_000

            async def parts() -> AsyncIterator[bytes]:
                if number % 2:
                    yield request(path, length=100_000_000)
                else:
                    yield request(path, b"", "Transfer-Encoding: chunked")
                for _ in range(100):
                    yield chunk if number % 2 else b"%x\r\n%s\r\n" % (len(chunk), chunk)

            return await self.send(parts())

        return await self.each(12, 6, one)

    async def large_json(self) -> Statuses:
        """As large as a body may be, and of many small values, also wrong ones, or of huge ones."""
        size = 31 * MIB
        bodies = [
            b'{"prompt":[%s1]}' % (b"1," * (size // 2)),
            b'{"prompt":"a","user":[%s{}]}' % (b"{}," * (size // 3)),
            b'{"prompt":"a","rid":[%s{}]}' % (b"{}," * 1_000_000),
            b'{"prompt":"a","metadata":{%s"b":0}}' % (b'"a":[],' * (size // 7)),
            b'{"prompt":"a","stop":[%s""]}' % (b'"x",' * 1_000_000),
            b'{"prompt":"%s"}' % (b"a b, " * (size // 5)),
            b'{"prompt":"a","seed":%s}' % (b"9" * size),
            b'{"prompt":"a","seed":%s}' % (b"9" * 4000),
            b'{"prompt":"a","seed":1e400,"top_p":-1e999}',
            b"[" * size,
            b'"' + b"\\" * size,
        ]

        async def one(number: int) -> str:
            return await self.send(once(request("/v1/completions", bodies[number])))

        return await self.each(len(bodies), 2, one)

    async def nesting(self) -> Statuses:
        """Of 10,000 levels, in every endpoint with a body."""
        paths = [*GENERATES, "/tokenize", "/detokenize", "/abort_request", "/kvkeep/evict"]
        deep = [b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000]

        async def one(number: int) -> str:
            value, path = deep[number % 2], paths[number // 2 % len(paths)]
            names = ("prompt", "messages", "metadata", "unknown", "kvkeep", "chat_template_kwargs")
            name = names[number % len(names)]

            return await self.send(once(request(path, b'{"%s": %s}' % (name.encode(), value))))

        return await self.each(84, 8, one)

    async def slow_heads(self) -> Statuses:
        """A byte of the request's line or headers every quarter of a second."""
        return await self._trickle(b"", completion())

    async def slow_bodies(self) -> Statuses:
        """A byte of the body every quarter of a second."""
        whole = completion()
        end = whole.index(b"\r\n\r\n") + 4
        return await self._trickle(whole[:end], whole[end:])

    async def _trickle(self, first: bytes, then: bytes) -> Statuses:
        async def one(number: int) -> str:
            async def parts() -> AsyncIterator[bytes]:
                yield first
                for byte in then:
                    yield bytes([byte])
                    await asyncio.sleep(0.25)

            return await self.send(parts())

        return await self.each(300, 300, one)

    async def slow_readers(self) -> Statuses:
        """Streams and whole answers that nobody reads: longer than the system buffers."""
        loop = asyncio.get_running_loop()

        async def one(number: int) -> str:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", self._port))
                more = {"stream": number % 2 == 0, "n": 8, "echo": True, "logprobs": 20}
                await loop.sock_sendall(client, completion(20, 900, **more))
                end = time.monotonic() + 60
                while time.monotonic() < end:  # it has been cut off once writing fails
                    await asyncio.sleep(0.5)
                    try:
                        client.send(b"x")
                    except BlockingIOError:
                        continue
                return "not cut off"

        return await self.each(6, 6, one)

    async def aborted_streams(self) -> Statuses:
        """1,500 streams that their clients leave within 0.2 s."""

        async def one(number: int) -> str:
            reader, writer = await self._connect()
            writer.write(completion(500, stream=True))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(random.randrange(1, 4000)), random.random() / 5)
            writer.close()
            return "left"

        return await self.each(1500, 100, one)

    async def many_connections(self) -> Statuses:
        """More than may be, all with a request."""
        kept = []

        async def one(number: int) -> str:
            reader, writer = await self._connect()
            kept.append(writer)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            return await status_of(reader)

        statuses = await self.each(CONNECTIONS + 200, CONNECTIONS + 200, one)
        for writer in kept:
            writer.close()
        return statuses

    async def no_http(self) -> Statuses:
        """Random bytes, broken chunks, contradicting lengths, upgrades."""
        whole = completion()
        said = [
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
            request("/v1/completions", b"", "Transfer-Encoding: chunked") + b"zz\r\n",
            request("/v1/completions", b"{}", "Content-Length: 1", length=2),
            whole.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: websocket\r\nHost"),
            whole.replace(b"Host", b"Expect: 100-continue\r\nHost"),
            whole.replace(b"HTTP/1.1", b"HTTP/2.0"),
            b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /%ff%00?a=%zz HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"x" * 200_000 + b"\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            whole * 20,
        ]

        async def one(number: int) -> str:
            kind = number % (len(said) + 1)
            return await self.send(once(said[kind] if kind < len(said) else random.randbytes(500)))

        return await self.each(240, 24, one)
