"""``kvkeep bench experiment load``: streams and short requests whose clients hang up at random.

So many streams are open all the time: when one ends, or its client hangs up, another begins. Short
requests come beside them at a given rate, whether or not earlier ones were answered. Each request
has a connection of its own. The same load without clients that hang up runs before and after, half
as long each, on a server of its own; what it delivers is what the disconnects are judged by.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import numpy as np

from ...demo.process import Server
from ...demo.run import TARGET
from ..serving.answers import Answer
from ..serving.client import LEFT, Call, Client, Target, clock, connected
from ..serving.figures import Spread, per, spread
from ..serving.plots import Line, Panel, draw
from ..serving.prompts import IdSource
from ..serving.running import Outputs, until
from ..serving.show import console, number, print_rows
from .processes import Process, engine_of, slope
from .repeating import VOCABULARY
from .trial import SILENCE, Claim, Tell, conclude, progress, servers

OFFERED = 0.95  # of the rate of short requests, or the client was too slow
LATE_SECONDS = 1.0  # with which a short request was not sent in time
GOODPUT = 0.9  # with disconnects / without, in tokens that clients got
GROWTH = 1.0  # MiB a minute, of server and engine together
SLOPE_SECONDS = 120.0  # of load, to tell a slope from what every start takes
WARM_UP = 0.2  # share of the samples of memory that come before pools have been touched
ALLOWED = ("HTTP 429", LEFT)  # kinds of failures
IDLE_SECONDS = 15.0  # within which everything must have been given back

_SHORT = 64  # short requests for which there is room beside the streams
_CPU = "cpu_ms_per_connection"
_HELD = ("running_requests", "waiting_requests", "leases", "transfers_pending", "prefetches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """The load, and how long it lasts."""

    seconds: float = 600.0  # with disconnects; and as long without
    streams: int = 256  # open at a time
    connections: float = 50.0  # short requests per second
    prompt_tokens: int = 32  # of every request
    stream_tokens: int = 256  # that a stream answers
    short_tokens: int = 4  # that a short request answers
    hang_ups: float = 0.2  # share of clients that hang up


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of the server's two processes at a moment."""

    seconds: float  # since the load began
    server_mib: float
    engine_mib: float


@dataclass(frozen=True, slots=True)
class Phase:
    """What a load brought."""

    seconds: float
    short_per_s: float  # short requests that the client sent in time
    answers: list[Answer]
    samples: list[Sample]
    busy: dict[str, float]  # processor seconds of server, engine and client


def run(pressure: Pressure, outputs: Outputs) -> bool:
    """Put the load on two servers, print its figures; return whether the claims hold.

    Raises:
        ConfigError: a server did not start, or a file cannot be written.
    """
    outputs.check()
    # Few pages, so that all of them have been touched when the warm-up ends.
    pages = 2 + (pressure.prompt_tokens + pressure.stream_tokens) // 64
    running = pressure.streams + _SHORT
    options = ["--max-total-tokens", str(64 * pages * running), "--hicache-ratio", "1"]
    options += ["--max-running-requests", str(running)]
    with servers() as start, progress(round(2 * pressure.seconds)) as tell:
        calm, rough = start([str(TARGET), *options], [str(TARGET), *options])
        before = [_held(server) for server in (calm, rough)]
        half = pressure.seconds / 2
        first = asyncio.run(_load(calm, pressure, 0.0, half, 1, tell))
        middle = asyncio.run(_load(rough, pressure, pressure.hang_ups, pressure.seconds, 2, tell))
        last = asyncio.run(_load(calm, pressure, 0.0, half, 3, tell))
        after = [_given_back(*pair) for pair in zip((calm, rough), before, strict=True)]
    busy = {name: first.busy[name] + last.busy[name] for name in first.busy}
    short = min(first.short_per_s, last.short_per_s)
    quiet = Phase(first.seconds + last.seconds, short, first.answers + last.answers, [], busy)
    figures = {
        "without disconnects": _figures(quiet),
        "with disconnects": _figures(middle),
        "memory": _growth(middle.samples),
        "held": {"before": before, "after": after},
        "samples": [asdict(sample) for sample in middle.samples],
    }
    _show(figures)
    if outputs.plot is not None:
        draw(_panels(middle.samples), outputs.plot)
    return conclude("load", asdict(pressure), figures, claims(pressure, figures), outputs)


async def _load(
    server: Server, pressure: Pressure, hang_ups: float, seconds: float, seed: int, tell: Tell
) -> Phase:
    """Keep the streams open for so long."""
    random = np.random.default_rng(seed)
    source = IdSource(random, VOCABULARY)
    watched = Process(server.pid), engine_of(server.pid)
    every = dict(zip(("server", "engine", "client"), (*watched, Process(os.getpid())), strict=True))
    used = {name: each.cpu_seconds for name, each in every.items()}
    answers: list[Answer] = []
    samples: list[Sample] = []
    short = max(1, round(pressure.connections * seconds))
    dues = np.sort(random.uniform(0, seconds, short))  # a Poisson process of so many
    in_time, begin = 0, clock()

    usual = dict.fromkeys((pressure.stream_tokens, pressure.short_tokens), 1.0)  # seconds it took

    async def send(client: Client, tokens: int) -> Answer:
        leaves = random.random() < hang_ups
        left = max(begin + seconds - clock(), 0.0)  # then everybody hangs up
        patience = min(left, random.uniform(0, usual[tokens]) if leaves else left)
        prompt = source.draw(pressure.prompt_tokens)
        answer = await client.send(Call({"prompt": prompt}, tokens, patience=patience))
        answers.append(answer)
        if not answer.error:
            usual[tokens] = answer.latency
        return answer

    async def stream(client: Client) -> None:
        while clock() - begin < seconds:
            answer = await send(client, pressure.stream_tokens)
            if answer.error not in ("", LEFT):
                await asyncio.sleep(0.1)  # as a client does that was refused

    async def ask(client: Client, due: float) -> None:
        nonlocal in_time
        in_time += clock() - due < LATE_SECONDS
        await send(client, pressure.short_tokens)

    async def sample() -> None:
        for second in count():
            now = clock() - begin
            samples.append(Sample(now, *(each.rss_mib for each in watched)))
            tell(f"{'with' if hang_ups else 'without'} disconnects", 1 if second else 0)
            await asyncio.sleep(1.0)

    put = Target(base_url=server.url, timeout=SILENCE, reuse=False)
    async with connected(put) as client:
        sampling = asyncio.create_task(sample())
        async with asyncio.TaskGroup() as group:
            for _ in range(pressure.streams):
                group.create_task(stream(client))
            for due in dues.tolist():
                await until(begin + due)
                group.create_task(ask(client, begin + due))
        sampling.cancel()
    busy = {name: each.cpu_seconds - used[name] for name, each in every.items()}
    return Phase(clock() - begin, in_time / seconds, answers, samples, busy)


def _held(server: Server) -> dict[str, float]:
    """What a server holds: requests and transfers, slots in use once all is evicted, files."""
    for tier in ("device", "host"):
        server.empty(tier)
    held = {name: server.metric(f"kvkeep_{name}") for name in _HELD}
    held["slots"] = server.metric("kvkeep_slots") - server.metric("kvkeep_free_slots")
    held["server files"] = Process(server.pid).files
    held["engine files"] = engine_of(server.pid).files
    return held


def _given_back(server: Server, before: dict[str, float]) -> dict[str, float]:
    """What it holds when it holds no more than before, or after ``IDLE_SECONDS``."""
    end = time.monotonic() + IDLE_SECONDS
    while (now := _held(server)) != before and time.monotonic() < end:
        time.sleep(0.5)
    return now


def _figures(phase: Phase) -> dict[str, Any]:
    good = [answer for answer in phase.answers if not answer.error]
    tokens = sum(answer.output_tokens for answer in phase.answers)
    first = spread([1e3 * answer.ttft for answer in good if answer.ttft is not None])
    whole = spread([1e3 * answer.latency for answer in good])
    return {
        "seconds": phase.seconds,
        "connections": len(phase.answers),
        "connections_per_s": len(phase.answers) / phase.seconds,
        "short_per_s": phase.short_per_s,
        "completed": len(good),
        "errors": dict(Counter(answer.error for answer in phase.answers if answer.error)),
        "messages": {answer.error: answer.message for answer in phase.answers if answer.error},
        "delivered_tokens_per_s": tokens / phase.seconds,
        "completed_tokens_per_s": sum(answer.output_tokens for answer in good) / phase.seconds,
        _CPU: {name: 1e3 * seconds / len(phase.answers) for name, seconds in phase.busy.items()},
        "ttft_ms": _short(first),
        "latency_ms": _short(whole),
    }


def _short(values: Spread | None) -> dict[str, float]:
    return {"median": values.median, "p99": values.p99} if values else {}


def _growth(samples: Sequence[Sample]) -> dict[str, float]:
    """MiB at the start and the end, and MiB a minute after the warm-up."""
    late = samples[int(WARM_UP * len(samples)) :]
    minutes = [sample.seconds / 60 for sample in late]
    return {
        "server_mib": late[-1].server_mib,
        "engine_mib": late[-1].engine_mib,
        "server_mib_per_minute": slope(minutes, [sample.server_mib for sample in late]),
        "engine_mib_per_minute": slope(minutes, [sample.engine_mib for sample in late]),
    }


def claims(pressure: Pressure, figures: dict[str, Any]) -> list[Claim]:
    """What must hold of the figures."""
    calm, rough = figures["without disconnects"], figures["with disconnects"]
    errors = Counter(calm["errors"]) + Counter(rough["errors"])
    bad = {kind: n for kind, n in errors.items() if kind not in ALLOWED}
    rates = [one["short_per_s"] for one in (calm, rough)]
    ratio = per(rough["delivered_tokens_per_s"], calm["delivered_tokens_per_s"]) or 0.0
    memory, held = figures["memory"], figures["held"]
    wanted = OFFERED * pressure.connections
    brief = pressure.seconds < SLOPE_SECONDS
    growth = memory["server_mib_per_minute"] + memory["engine_mib_per_minute"]
    kept = [
        f"{name} {now:g} instead of {was[name]:g}"
        for was, is_now in zip(held["before"], held["after"], strict=True)
        for name, now in is_now.items()
        if now > was[name]
    ]
    return [
        Claim(f"no failures but 429 and those who hung up: {bad or 'none'}", not bad),
        Claim(
            f"beside {pressure.streams} streams, {min(rates):.1f} >= {wanted:g} short requests a "
            f"second, prompts of {pressure.prompt_tokens} tokens",
            min(rates) >= wanted,
        ),
        Claim(
            f"tokens delivered a second are {ratio:.2f} >= {GOODPUT} of those without disconnects",
            ratio >= GOODPUT,
        ),
        Claim(
            f"memory grows by {growth:.2f} <= {GROWTH:g} MiB a minute"
            + (", which so short a load cannot show" if brief else ""),
            brief or growth <= GROWTH,
        ),
        Claim(f"nothing is held when idle: {', '.join(kept) or 'nothing'}", not kept),
    ]


def _show(figures: dict[str, Any]) -> None:
    both = [figures[name] for name in ("without disconnects", "with disconnects")]
    rates = ("connections_per_s", "short_per_s", "delivered_tokens_per_s", "completed_tokens_per_s")
    names = ("connections", "completed", *rates)
    lines = [[name.replace("_", " "), *(number(one[name], 1) for one in both)] for name in names]
    for name in ("ttft_ms", "latency_ms"):
        for part in ("median", "p99"):
            cells = (number(one[name].get(part), 1) for one in both)
            lines.append([f"{part} {name.replace('_', ' ')}", *cells])
    lines += [
        [f"{name} CPU ms per connection", *(number(one[_CPU][name], 1) for one in both)]
        for name in both[0][_CPU]
    ]
    lines += [
        [kind, *(number(one["errors"].get(kind, 0), 0) for one in both)]
        for kind in sorted({kind for one in both for kind in one["errors"]})
    ]
    print_rows(console(), "", ("", "no disconnects", "disconnects"), lines)
    lines = [[name.replace("_", " "), number(n, 2)] for name, n in figures["memory"].items()]
    print_rows(console(), "", ("memory", ""), lines)


def _panels(samples: Sequence[Sample]) -> list[Panel]:
    minutes = [sample.seconds / 60 for sample in samples]
    lines = [
        Line("server", minutes, [sample.server_mib for sample in samples]),
        Line("engine", minutes, [sample.engine_mib for sample in samples]),
    ]
    return [Panel("minutes of load", "resident memory (MiB)", lines)]
