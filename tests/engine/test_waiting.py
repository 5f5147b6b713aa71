"""Which waiting request runs next, how requests share a step, and which are refused."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rig import Pair, Rig, prompt

from kvkeep.engine.core import _MESSAGES
from kvkeep.engine.messages import Abort, Ask, Failed, Figures, Generate, Reply, Sampling
from kvkeep.engine.request import RequestState
from kvkeep.engine.waiting import WaitingLine


def request(name: str, age: float = 0.0, reach: int = 0, priority: int = 0) -> RequestState:
    """One that has waited ``age`` seconds."""
    message = Generate(id=name, tokens=[1], sampling=Sampling(), priority=priority)
    seq = RequestState.of(message, 0)
    seq.times.arrived = time.monotonic() - age
    seq.prefetch = SimpleNamespace(reach=reach)  # type: ignore[assignment]
    return seq


def order(line: WaitingLine) -> str:
    return "".join(seq.id for seq in line)


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", "abcd"), ("lpm", "bdac"), ("priority", "cadb")]
)
def test_policies(policy: str, expected: str) -> None:
    line = WaitingLine(policy, patience=60.0)
    for name, reach, priority in (("a", 1, 7), ("b", 5, 0), ("c", 0, 200), ("d", 5, 7)):
        line.add(request(name, 0.0, reach, priority))
    assert order(line) == expected


def test_no_policy_starves_a_request() -> None:
    line = WaitingLine("priority", patience=5.0)
    for name, age, priority in (("a", 9.0, 0), ("b", 8.0, 9), ("c", 1.0, 3), ("d", 0.0, 255)):
        line.add(request(name, age, priority=priority))
    assert order(line) == "abdc"


def test_what_was_preempted_goes_first() -> None:
    line = WaitingLine("priority", patience=5.0)
    line.add(request("a", 9.0))
    one, two = request("b"), request("c")
    line.put_back(one)
    line.put_back(two)
    assert order(line) == "cba"
    line.remove(two)
    line.remove(next(seq for seq in line if seq.id == "a"))
    assert order(line) == "b"
    assert len(line) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["new", "known"]),
        ({"schedule_policy": "lpm"}, ["known", "new"]),
        ({"schedule_policy": "lpm", "schedule_patience": 0.0}, ["new", "known"]),
    ],
)
def test_the_longest_prefix_match_goes_first(
    options: dict[str, Any], expected: list[str], tiny: Pair
) -> None:
    started: list[str] = []
    with Rig(tiny, max_running=1, **options) as rig:
        rig.ask(prompt(200), 2)
        rig.send(prompt(20), 30)
        names = {rig.send(prompt(100, 9), 4): "new", rig.send(prompt(200), 4): "known"}
        rig.on_output = lambda seq: started.append(names.get(seq.id, ""))
        rig.run()
    assert list(dict.fromkeys(name for name in started if name)) == expected


def test_a_long_prompt_does_not_hold_up_short_ones(tiny: Pair) -> None:
    """And goes on meanwhile: it has half of each step."""
    with Rig(tiny, draft=False, chunked_prefill_size=32) as rig:
        long = rig.send(prompt(800), 4)
        shorts: list[str] = []
        first = {}
        for turn in rig.turns():
            if turn % 2 == 0 and turn < 40:
                shorts.append(rig.send(prompt(15, turn), 2))
            for name in (long, *shorts):
                if rig.answers[name].tokens:
                    first.setdefault(name, turn)
        assert all(first[name] - 2 * i <= 3 for i, name in enumerate(shorts))
        assert first[long] <= 2 * 800 / 32 + 2


def test_a_long_prompt_alone_has_the_whole_step(tiny: Pair) -> None:
    with Rig(tiny, draft=False, chunked_prefill_size=32) as rig:
        rig.ask(prompt(320), 1)
        assert rig.figure("steps_total") == 10


def test_a_full_line_refuses_requests(tiny: Pair) -> None:
    with Rig(tiny, max_running=1, max_queued=2) as rig:
        running = rig.send(prompt(20), 30)
        while not rig.answers[running].tokens:
            rig.engine.turn()
        names = [rig.send(prompt(20, i), 2) for i in range(4)]
        ends = [answer.end for answer in rig.run(*names)]
        assert [isinstance(end, Failed) and end.kind for end in ends] == [
            *(False, False, "Overloaded", "Overloaded")
        ]
        rig.check_idle()


def test_a_deadline_ends_a_request_that_waits_or_runs(tiny: Pair) -> None:
    with Rig(tiny, max_running=1) as rig:
        runs = rig.send(prompt(20), 400, deadline_seconds=3600.0)
        for turn in rig.turns():
            if turn == 3:
                waits = rig.send(prompt(30), 4, deadline_seconds=0.0)
                after = rig.send(prompt(40), 4)
            if turn == 6:
                assert rig.answers[waits].end
                rig.engine._deadlines = [(0.0, runs)]
        assert 0 < len(rig.answers[runs].tokens) < 400
        for name in (runs, waits):
            end = rig.answers[name].end
            assert isinstance(end, Failed)
            assert end.kind == "DeadlineExceeded"
        assert len(rig.answers[after].tokens) == 4
        rig.check_idle()


def test_a_flood_of_requests_holds_up_no_step(tiny: Pair) -> None:
    with Rig(tiny, draft=False, max_running=2) as rig:
        first = rig.send(prompt(10), 40)
        while not rig.answers[first].tokens:
            rig.engine.turn()
        names = [rig.send([3 + i % 100], 1) for i in range(8 * _MESSAGES)]
        for turn in range(1, 5):
            had = len(rig.answers[first].tokens)
            rig.engine.turn()
            assert len(rig.answers[first].tokens) == had + 1
            assert len(rig.engine.scheduler.waiting) <= turn * _MESSAGES
        assert all(isinstance(answer.finished.reason, str) for answer in rig.run(*names))
        rig.check_idle()


def test_a_flood_that_was_aborted_holds_up_nobody(tiny: Pair) -> None:
    """``/health`` waited for the turns of all messages before it, each with a step."""
    with Rig(tiny, draft=False, max_running=2) as rig:
        first = rig.send(prompt(10), 40)
        while not rig.answers[first].tokens:
            rig.engine.turn()
        replies: list[Reply] = []
        rig.engine.listen(replies.append)
        for name in [rig.send([3], 1) for _ in range(8 * _MESSAGES)]:
            rig.engine.send(Abort(name))
        rig.engine.send(Ask("health"))
        for _ in range(2):
            rig.engine.send(Generate(id="next", tokens=[3], sampling=Sampling(max_tokens=1)))
        rig.engine.turn()
        figures, refused, *_ = replies
        assert isinstance(figures, Figures)
        assert isinstance(refused, Failed)
        assert "in use" in refused.message
        for name in (first, "next"):
            rig.engine.send(Abort(name))
        rig.check_idle()


def test_a_request_that_stores_nothing_leaves_no_page(tiny: Pair, tmp_path: Path) -> None:
    """It may hit what others stored."""
    with Rig(tiny, storage_dir=tmp_path) as rig:
        expected = rig.ask(prompt(100), 40).tokens
        rig.settle()
        pages, moved = rig.figure("pages"), rig.figure("moved_bytes_total")
        known = rig.ask(prompt(100), 40, no_store=True)
        other = rig.ask(prompt(90, 1), 40, no_store=True)
        rig.settle()
        assert known.tokens == expected
        assert known.cached["device"] == 96
        assert (rig.figure("pages"), rig.figure("moved_bytes_total")) == (pages, moved)
        again = rig.ask(prompt(90, 1), 40)
        assert not any(again.cached.values())
        assert again.tokens == other.tokens
        rig.check_idle()
