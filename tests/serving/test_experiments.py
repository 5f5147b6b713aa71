"""kvkeep bench experiment: prompts, loads and verdicts, without the demo's servers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_runs import answer, bench
from stub_server import Reply, serving, streamed

from kvkeep.bench.experiments import load, restart, same_outputs, tokenize, trial, turns
from kvkeep.bench.experiments.processes import Process, engine_of, slope
from kvkeep.bench.experiments.repeating import Words, demo_prompt
from kvkeep.bench.experiments.trial import Claim, conclude
from kvkeep.bench.serving.client import LEFT, Call, Target, connected
from kvkeep.bench.serving.running import Outputs
from kvkeep.demo.run import HERE


def held(claims: list[Claim]) -> list[bool]:
    return [claim.holds for claim in claims]


def test_prompts_are_the_demos() -> None:
    stored = json.loads((HERE / "prompts.json").read_text())
    for name, period in (("period-64", 64), ("period-200", 200), ("decoy", 1024)):
        assert [demo_prompt(period, index) for index in range(4)] == stored[name]


def test_words_repeat_and_their_text_encodes_to_them() -> None:
    words = Words()
    tokens = words.repeated(200, 500, seed=1)
    assert len(tokens) == 500
    assert tokens[200:400] == tokens[:200]
    assert len(set(tokens)) == 200
    assert words._tokenizer.encode(words.text(tokens)).ids == tokens


def test_a_failed_claim_fails_the_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "machine", dict)  # the real one imports PyTorch
    claims, file = [Claim("a", True), Claim("b", False)], tmp_path / "x.json"
    assert not conclude("trial", {"size": 1}, {"more": 2}, claims, Outputs(file))
    assert capsys.readouterr().out.splitlines() == ["holds  a", "FAILS  b"]
    written = json.loads(file.read_text())
    assert (written["setting"], written["more"]) == ({"size": 1}, 2)
    assert [one["holds"] for one in written["claims"]] == [True, False]
    assert conclude("trial", {}, {}, claims[:1], Outputs())


@pytest.mark.parametrize(("holds", "code"), [(True, 0), (False, 1)])
def test_the_command_ends_as_the_claims_do(
    monkeypatch: pytest.MonkeyPatch, holds: bool, code: int
) -> None:
    asked: list[same_outputs.Questions] = []

    def run(questions: same_outputs.Questions, outputs: Outputs) -> bool:
        asked.append(questions)
        return holds

    monkeypatch.setattr(same_outputs, "run", run)
    assert bench("experiment", "outputs", "--quick") == (code, "")
    assert bench("experiment", "outputs", "--prompts", 7) == (code, "")
    assert [one.prompts for one in asked] == [4, 7]


def test_outputs_must_be_equal_and_hits_from_their_tier() -> None:
    off = [answer(0, 1, tokens=(at, at), cached_tokens=0) for at in range(2)]
    runs = {"off": off, "cold": off}
    runs |= {
        tier: [replace(one, cached_tokens=64, tiers={tier: 64}) for one in off]
        for tier in same_outputs.TIERS
    }
    assert all(held(same_outputs.claims(runs)))
    other = replace(runs["host"][1], tokens=(1, 2))
    elsewhere = replace(runs["storage"][0], tiers={"device": 64})
    cached = replace(off[0], cached_tokens=1)
    for name, wrong, fails in (("host", other, 3), ("storage", elsewhere, 7), ("off", cached, 0)):
        found = held(same_outputs.claims(runs | {name: [wrong, runs[name][1]]}))
        failed = [at for at, holds in enumerate(found) if not holds]
        assert fails in failed


@pytest.mark.parametrize(("stale", "holds"), [(50.0, True), (51.0, False)])
def test_restored_must_be_twice_as_fast_as_stale(stale: float, holds: bool) -> None:
    speeds = {"restored": 100.0, "masked": 99.0, "stale": stale}
    sides = {side: {"output_throughput": speed} for side, speed in speeds.items()}
    (claim,) = restart.claims({"a client": sides})
    assert claim.holds == holds


def test_the_sides_take_turns_round_by_round() -> None:
    order: list[str] = []

    def respond(side: str) -> Callable[[str, dict[str, Any]], Reply]:
        def reply(path: str, body: dict[str, Any]) -> Reply:
            order.append(side)
            return Reply(streamed([7], len(body["prompt"])))

        return reply

    talking = turns.Talking(
        num_clients=3, num_rounds=2, request_length=4, output_length=1, max_parallel=2
    )
    with serving(respond("on")) as on, serving(respond("off")) as off:
        sides: Any = {turns.ON: on, turns.OFF: off}
        found = asyncio.run(turns._talk(talking, sides, lambda what, steps=0: None))
    assert order == [side for _ in range(2) for side in ("on", "off") for _ in range(3)]
    prompts = [[body["prompt"] for _, body in side.requests] for side in (on, off)]
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert {len(prompt) for prompt in prompts[0]} == {4, 9}
    assert [len(each) for each in found.values()] == [6, 6]


def test_tiers_must_bring_first_tokens_earlier_and_more_of_them() -> None:
    def rounds(first: list[float], seconds: float) -> list[dict[str, Any]]:
        figures = {"failed": 0, "hit_rate": 0.5, "output_tokens": 30, "duration": seconds}
        return [figures | {"mean_ttft_ms": ttft} for ttft in first]

    off = rounds([10, 10, 10], 1.5)
    assert all(held(turns.claims({turns.ON: rounds([11, 9, 9], 1), turns.OFF: off})))
    slow = turns.claims({turns.ON: rounds([9, 9, 10], 1.1), turns.OFF: off})
    assert held(slow) == [True, False, False]


def test_a_client_hangs_up_and_connects_anew() -> None:
    calls = [Call({"prompt": [1]}, 2), Call({"prompt": [1]}, 2, patience=0.01)]

    async def hung(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # to the end of the connection
        writer.close()
        ended.set()

    async def work(url: str) -> None:
        async with connected(Target(base_url=url, model="m", reuse=False)) as client:
            assert [(await client.send(calls[0])).error for _ in range(3)] == [""] * 3
        async with await asyncio.start_server(hung, "127.0.0.1", 0) as silent:
            port = silent.sockets[0].getsockname()[1]
            deaf = Target(base_url=f"http://127.0.0.1:{port}", model="m", reuse=False)
            async with connected(deaf) as client:
                assert (await client.send(calls[1])).error == LEFT
            await ended.wait()

    ended = asyncio.Event()
    with serving(lambda path, body: Reply(streamed([1, 2], 1))) as stub:
        asyncio.run(work(stub.url))
        assert stub.connections == 3


def test_load_is_judged_by_errors_goodput_memory_and_what_is_held() -> None:
    pressure = load.Pressure()

    def figures(**changed: Any) -> dict[str, Any]:
        phase = {"errors": {}, "short_per_s": 50.0, "delivered_tokens_per_s": 100.0}
        memory = {"server_mib_per_minute": 0.5, "engine_mib_per_minute": 0.5}
        nothing = [{"leases": 0.0}] * 2
        good = {
            "without disconnects": phase, "with disconnects": phase, "memory": memory,
            "held": {"before": nothing, "after": nothing},
        }  # fmt: skip
        name = changed.pop("of", "with disconnects")
        return good | {name: good[name] | changed}  # type: ignore[operator]

    assert all(held(load.claims(pressure, figures(errors={"HTTP 429": 3, LEFT: 9}))))
    wrong = [
        figures(errors={"HTTP 500": 1}),
        figures(short_per_s=47.0),
        figures(delivered_tokens_per_s=89.0),
        figures(of="memory", engine_mib_per_minute=0.6),
        figures(of="held", after=[{"leases": 0.0}, {"leases": 1.0}]),
    ]
    for at, each in enumerate(wrong):
        assert held(load.claims(pressure, each)) == [other != at for other in range(5)]
    dead = figures(of="without disconnects", delivered_tokens_per_s=0.0)
    assert held(load.claims(pressure, dead)) == [True, True, False, True, True]


@pytest.mark.parametrize(("late", "rate"), [(1e9, 40.0), (-1e9, 0.0)])
def test_only_short_requests_in_time_count_as_offered(
    monkeypatch: pytest.MonkeyPatch, late: float, rate: float
) -> None:
    """Streams that are refused connect again and again: they would hide that others are missing."""
    monkeypatch.setattr(load, "engine_of", Process)
    monkeypatch.setattr(load, "LATE_SECONDS", late)
    pressure = load.Pressure(streams=4, connections=40.0, stream_tokens=2, short_tokens=1)
    with serving(lambda path, body: Reply(streamed([1, 2], 1))) as stub:
        server: Any = SimpleNamespace(url=stub.url, pid=os.getpid())
        phase = asyncio.run(load._load(server, pressure, 0.0, 0.5, 1, lambda what, steps=0: None))
    assert phase.short_per_s == rate
    assert len(phase.answers) >= 4 + 20


def test_chats_must_be_offered_and_not_slow_the_streams() -> None:
    def figures(rate: float, ratio: float, failed: int = 0) -> dict[str, dict[str, Any]]:
        side = {"rate": rate, "ratio": ratio, "failed": failed}
        return {"two processes": side, "one process": side | {"failed": 0}}

    chatter = tokenize.Chatter()
    assert held(tokenize.claims(chatter, figures(47.5, 1.05))) == [True, True, True]
    assert held(tokenize.claims(chatter, figures(47.4, 1.06, 1))) == [False, False, False]


@pytest.mark.parametrize(("status", "error"), [("200 OK", None), ("429 Too Many", "429")])
def test_answers_of_tokenize_are_read_to_their_end(status: str, error: str | None) -> None:
    async def read() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(f"HTTP/1.1 {status}\r\nContent-Length: 3\r\n\r\nabcnext".encode())
        reader.feed_eof()
        await tokenize._read(reader)
        return await reader.read()

    if error is None:
        assert asyncio.run(read()) == b"next"
    else:
        with pytest.raises(RuntimeError, match=error):
            asyncio.run(read())


def test_processes_tell_their_memory_and_files(tmp_path: Path) -> None:
    me = Process(os.getpid())
    assert me.rss_mib > 10
    assert me.parent == os.getppid()
    before = me.files
    with (tmp_path / "x").open("w"):
        assert me.files == before + 1
    with pytest.raises(ProcessLookupError):
        engine_of(os.getpid())
    assert slope([0, 1, 2], [5, 7, 9]) == pytest.approx(2)
    assert slope([1], [1]) == 0.0
