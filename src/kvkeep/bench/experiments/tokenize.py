"""``kvkeep bench experiment tokenize``: what requests that only tokenise cost those that decode.

Streams decode, first alone, then beside ``POST /tokenize`` of long chats at a given rate. Both are
measured on a server whose engine has a process of its own, and on one whose engine is a thread of
the server's process. The servers take turns, and so do the two loads.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import numpy as np

from ...demo.process import Server
from ...demo.run import TARGET
from ..serving.answers import Answer
from ..serving.client import Call, clock, connected
from ..serving.figures import summarise
from ..serving.prompts import IdSource
from ..serving.running import Outputs, offer, until
from ..serving.show import console, number, print_rows
from .processes import Process, engine_of
from .repeating import VOCABULARY, Words
from .trial import Claim, conclude, progress, servers, target

SIDES = {"two processes": ("kvkeep", "serve"), "one process": (f"{__package__}.in_process",)}
"""The program that serves, by side."""

SLOWER = 1.05  # of decoding, with requests that tokenise / without
OFFERED = 0.95  # of the requests per second, or the machine could not take them


@dataclass(frozen=True, slots=True, kw_only=True)
class Chatter:
    """Both loads."""

    streams: int = 32
    prompt_tokens: int = 64
    output_tokens: int = 256
    rate: float = 50.0  # requests per second that tokenise
    chat_tokens: int = 8000
    turns: int = 5  # of each side
    connections: int = 8  # of requests that tokenise
    pin: bool = False  # the engine's process has a core to itself


@dataclass(slots=True)
class Window:
    """A time in which the streams decoded."""

    tpot_ms: float  # median over the streams
    failed: int
    asked: list[float] = field(default_factory=list)  # seconds that each chat took
    rate: float = 0.0  # chats per second


def run(chatter: Chatter, outputs: Outputs) -> bool:
    """Print medians of both sides and loads; return whether the claims hold.

    Raises:
        ConfigError: a server did not start, or a file cannot be written.
    """
    outputs.check()
    words = Words()
    text = words.text(words.repeated(500, chatter.chat_tokens, seed=0))
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    found: dict[str, dict[bool, list[Window]]] = {side: {False: [], True: []} for side in SIDES}
    with servers() as start, progress(4 * chatter.turns) as tell:
        every = {side: start([str(TARGET)], program=SIDES[side])[0] for side in SIDES}
        if chatter.pin:
            _pin(every["two processes"])
        for server in every.values():
            asyncio.run(_window(server, chatter, body, busy=True))  # warms it up
        for turn in range(chatter.turns):
            for side in list(SIDES)[:: -1 if turn % 2 else 1]:
                for busy in (turn % 2 == 1, turn % 2 == 0):
                    tell(f"{side}, turn {turn + 1}", 1)
                    window = asyncio.run(_window(every[side], chatter, body, busy))
                    found[side][busy].append(window)
    return _judge(chatter, found, outputs)


def _pin(server: Server) -> None:
    """The engine has the last core, the rest of the server the others, as this process has."""
    cores = sorted(os.sched_getaffinity(0))
    engine, rest = {cores[-1]}, set(cores[:-1]) or set(cores)
    engine_of(server.pid).pin(engine)
    for process in (Process(server.pid), Process(os.getpid())):
        process.pin(rest)


async def _window(server: Server, chatter: Chatter, body: bytes, busy: bool) -> Window:
    """Decode all streams to their end, with requests that tokenise meanwhile if ``busy``."""
    source = IdSource(np.random.default_rng(), VOCABULARY)
    calls = [
        Call({"prompt": source.draw(chatter.prompt_tokens)}, chatter.output_tokens)
        for _ in range(chatter.streams)
    ]
    answers: list[Answer] = []
    asked: list[float] = []
    chats = asyncio.create_task(_chats(server, chatter, body, asked)) if busy else None
    begin = clock()
    async with connected(target(server)) as client:
        await offer(
            calls, [0.0] * len(calls), None, client.send, lambda _, one: answers.append(one)
        )
    seconds = clock() - begin
    rate = len(asked) / seconds
    if chats is not None:
        chats.cancel()
        with suppress(asyncio.CancelledError):
            await chats
    whole = summarise(answers)
    tpot = whole.spreads["tpot_ms"]
    return Window(tpot.median if tpot else float("nan"), whole.failed, asked, rate)


async def _chats(server: Server, chatter: Chatter, body: bytes, asked: list[float]) -> None:
    """Send chats at the rate until cancelled, late ones as soon as a connection is free."""
    dues, begin = count(), clock()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /tokenize HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def connection() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            for due in dues:  # shared: each takes the next one
                await until(begin + due / chatter.rate)
                start = clock()
                writer.write(request)
                await _read(reader)
                asked.append(clock() - start)
        finally:
            writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(chatter.connections):
            group.create_task(connection())


async def _read(reader: asyncio.StreamReader) -> None:
    """Read a response and drop it: to parse it would take the client's time.

    Raises:
        RuntimeError: it is no success.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status, _, fields = head.partition("\r\n")
    length = next(x for x in fields.split("\r\n") if x.startswith("content-length:"))
    body = await reader.readexactly(int(length.partition(":")[2]))
    if " 200 " not in f"{status} ":
        raise RuntimeError(f"/tokenize: {status}: {body[:200]!r}")


def _judge(chatter: Chatter, found: dict[str, dict[bool, list[Window]]], outputs: Outputs) -> bool:
    figures = {side: _figures(windows[False], windows[True]) for side, windows in found.items()}
    heads = ("", "TPOT (ms)", "with chats", "ratio", "chats/s", "of a chat (ms)")
    lines = [
        [
            side,
            *(number(one[name], 2) for name in ("tpot_ms", "busy_tpot_ms")),
            number(one["ratio"], 3),
            *(number(one[name], 1) for name in ("rate", "chat_ms")),
        ]
        for side, one in figures.items()
    ]
    print_rows(console(), "", heads, lines)
    windows = {
        side: [[asdict(one) for one in each] for each in both.values()]
        for side, both in found.items()
    }
    everything = {"sides": figures, "windows": windows}
    return conclude("tokenize", asdict(chatter), everything, claims(chatter, figures), outputs)


def _figures(alone: Sequence[Window], busy: Sequence[Window]) -> dict[str, Any]:
    """Medians over the turns; the ratio is the median of the ratios of single turns."""
    ratios = [b.tpot_ms / a.tpot_ms for a, b in zip(alone, busy, strict=True)]
    return {
        "tpot_ms": statistics.median(one.tpot_ms for one in alone),
        "busy_tpot_ms": statistics.median(one.tpot_ms for one in busy),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "rate": statistics.median(one.rate for one in busy),
        "chat_ms": 1e3 * statistics.median(seconds for one in busy for seconds in one.asked),
        "failed": sum(one.failed for one in (*alone, *busy)),
    }


def claims(chatter: Chatter, figures: dict[str, dict[str, Any]]) -> list[Claim]:
    """What must hold of the figures of both sides."""
    now, before = figures["two processes"], figures["one process"]
    failed = now["failed"] + before["failed"]
    offered = OFFERED * chatter.rate
    return [
        Claim(f"{failed} streams failed", failed == 0),
        Claim(
            f"{now['rate']:.1f} >= {offered:g} chats of {chatter.chat_tokens:,} tokens a second "
            f"were tokenised ({before['rate']:.1f} with the engine in the server's process)",
            now["rate"] >= offered,
        ),
        Claim(
            f"meanwhile {chatter.streams} streams took {now['ratio']:.3f} <= {SLOWER} times as "
            f"long per token ({before['ratio']:.3f} with the engine in the server's process)",
            now["ratio"] <= SLOWER,
        ),
    ]
