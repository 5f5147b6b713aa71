"""An HTTP server on 127.0.0.1 that answers as a function says, byte for byte.

``python tests/serving/stub_server.py TOKENS`` serves completions of so many tokens, at once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

END = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Reply:
    chunks: list[bytes]
    status: int = 200
    cut: bool = False  # close the connection in the midst of the body


Respond = Callable[[str, dict[str, Any]], Reply]


def whole(body: object, status: int = 200) -> Reply:
    return Reply([json.dumps(body).encode()], status)


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def streamed(
    tokens: list[int], prompt: int = 0, finish: str | None = "length", **last: Any
) -> list[bytes]:
    """A completion with an event per token, whose text is ``t`` and the token."""
    pieces = [event(choices=[{"text": f"t{token}", "token_ids": [token]}]) for token in tokens]
    closing = event(choices=[{"text": "", "finish_reason": finish}], **last)
    cached = {"prompt_tokens_details": {"cached_tokens": 0}}
    usage = {"prompt_tokens": prompt, "completion_tokens": len(tokens), **cached}
    return [*pieces, closing, event(choices=[], usage=usage), END]


@dataclass
class Stub:
    """``respond(path, body)`` answers what is posted; ``pages`` what is got, in turns."""

    respond: Respond
    models: Reply = field(default_factory=lambda: whole({"data": [{"id": "stub"}]}))
    pages: dict[str, list[Reply]] = field(default_factory=dict)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most: int = 0  # requests that ran at a time
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client is gone, or the server stops
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        self.headers.append(headers)
        verb, path, _ = first.split()
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)  # others may come
        if path == "/v1/models":
            reply = self.models
        elif verb == "GET":
            pages = self.pages.get(path, [])
            reply = pages.pop(0) if pages else whole({"detail": "Not Found"}, 404)
        else:
            body = json.loads(content)
            self.requests.append((path, body))
            reply = self.respond(path, body)
        writer.write(f"HTTP/1.1 {reply.status} Said\r\n".encode())
        writer.write(b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for chunk in reply.chunks:
            writer.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            await writer.drain()
        self.running -= 1
        if reply.cut:
            return False
        writer.write(b"0\r\n\r\n")
        return True

    async def serve(self, ready: Callable[[], None], stop: asyncio.Event, port: int = 0) -> None:
        async with await asyncio.start_server(self.connected, "127.0.0.1", port) as server:
            self.port = server.sockets[0].getsockname()[1]
            ready()
            await stop.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()


@contextmanager
def serving(respond: Respond, **fields: Any) -> Iterator[Stub]:
    """A server on a free port, in a thread of its own."""
    stub, started, loop = Stub(respond, **fields), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=[stub.serve(started.set, stop)])
    thread.start()
    started.wait()
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


if __name__ == "__main__":
    chunks = streamed(list(range(int(sys.argv[1]))), 1)
    stub = Stub(lambda path, body: Reply(chunks))
    asyncio.run(stub.serve(lambda: print(stub.url, flush=True), asyncio.Event()))
