"""Requests that begin alike compute what they share once, and never wait for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rig import Pair, Rig, prompt

from kvkeep.engine import sharing
from kvkeep.engine.messages import Failed, Generate, Sampling
from kvkeep.engine.request import RequestState
from kvkeep.schema import Component, Group, Identity, Schema

LONG, PAGE, CHUNK = 500, 16, 64
HIT = (LONG - 1) // PAGE * PAGE


def rig_of(pair: Pair, **options: Any) -> Rig:
    return Rig(pair, **{"draft": False, "chunked_prefill_size": CHUNK, "page_size": PAGE} | options)


def computed(rig: Rig) -> float:
    return rig.figure("computed_tokens_total")


@pytest.mark.parametrize("draft", [False, True])
def test_choices_compute_their_prompt_once(tiny: Pair, draft: bool) -> None:
    tokens = prompt(LONG)
    with rig_of(tiny, draft=draft) as rig:
        alone = rig.ask(tokens, 8, namespace="alone").tokens
        before, hits = computed(rig), rig.figure("hit_tokens_total")
        names = [rig.send(tokens, 8) for _ in range(4)]
        answers = rig.run(*names)
        assert [answer.tokens for answer in answers] == [alone] * 4
        first, *others = (answer.cached["device"] for answer in answers)
        assert (first, others) == (0, [HIT] * 3)
        assert rig.figure("hit_tokens_total") - hits == 3 * HIT
        prompts = LONG + 3 * (LONG - HIT)
        assert prompts <= computed(rig) - before <= prompts + 4 * 8
        rig.check_idle()


@pytest.mark.parametrize("kind", ["qwen3-next", "mistral"])
def test_other_kinds_of_state(make_pair: Callable[[str], Pair], kind: str) -> None:
    """A hit on recurrent state ends only where the first request leaves a snapshot."""
    pair, tokens = make_pair(kind), prompt(100)
    with rig_of(pair, page_size=8, chunked_prefill_size=17) as rig:
        alone = rig.ask(tokens, 4, namespace="alone").tokens
        others = [rig.send(tokens[:50] + prompt(50, i), 4) for i in range(2)]
        answers = rig.run(*[rig.send(tokens, 4) for _ in range(3)])
        assert [answer.tokens for answer in answers] == [alone] * 3
        assert [answer.cached["device"] for answer in answers[1:]] == [96] * 2
        assert all(rig.answers[name].finished for name in others)
        rig.check_idle()


def test_one_waits_only_for_what_it_shares(tiny: Pair) -> None:
    """Then it runs beside the other, which has long to go."""
    tokens = prompt(2000)
    with rig_of(tiny) as rig:
        rig.send(tokens, 2)
        short = rig.send(tokens[:100] + prompt(20), 2)
        for _ in rig.turns():
            if rig.answers[short].end is not None:
                break
        assert rig.answers[short].cached["device"] == 96
        (seq,) = rig.engine.scheduler.running
        assert seq.computed < 1000
        rig.run()


@pytest.mark.parametrize(
    "options", [{"namespace": "other"}, {"prompt_logprobs": True, "logprobs": 0}]
)
def test_who_cannot_hit_does_not_wait(tiny: Pair, options: dict[str, Any]) -> None:
    with rig_of(tiny) as rig:
        rig.send(prompt(LONG), 2)
        rig.send(prompt(LONG), 2, **options)
        rig.engine.turn()
        assert len(rig.engine.scheduler.running) == 2
        rig.run()


def test_nobody_waits_for_what_will_be_forgotten(tiny: Pair) -> None:
    with rig_of(tiny) as rig:
        rig.send(prompt(LONG), 2, no_store=True)
        rig.send(prompt(LONG), 2)
        rig.engine.turn()
        assert len(rig.engine.scheduler.running) == 2
        rig.run()


def test_nobody_waits_for_what_is_cached(tiny: Pair) -> None:
    """A request for the prompt's log-probabilities computes it anew; others need not."""
    with rig_of(tiny) as rig:
        rig.ask(prompt(LONG), 2)
        rig.send(prompt(LONG), 2, prompt_logprobs=True, logprobs=0)
        hit = rig.send(prompt(LONG), 2)
        rig.engine.turn()
        assert len(rig.engine.scheduler.running) == 2
        rig.run()
        assert rig.answers[hit].cached["device"] == HIT


def test_others_do_not_wait_behind_those_that_wait(tiny: Pair) -> None:
    with rig_of(tiny) as rig:
        first, second = (rig.send(prompt(LONG), 2) for _ in range(2))
        third = rig.send(prompt(LONG, 1), 2)
        rig.engine.turn()
        assert [seq.id for seq in rig.engine.scheduler.running] == [first, third]
        assert [seq.id for seq in rig.engine.scheduler.waiting] == [second]
        rig.run()


@pytest.mark.parametrize("turns", [1, 4])
def test_the_next_one_computes_if_the_first_is_aborted(tiny: Pair, turns: int) -> None:
    tokens = prompt(LONG)
    with rig_of(tiny) as rig:
        alone = rig.ask(tokens, 4, namespace="alone").tokens
        before = computed(rig)
        names = [rig.send(tokens, 4) for _ in range(4)]
        for _ in range(turns):
            rig.engine.turn()
        rig.abort(names[0])
        answers = rig.run(*names[1:])
        assert [answer.tokens for answer in answers] == [alone] * 3
        assert computed(rig) - before < LONG + 2 * CHUNK + 3 * 4 + 3 * PAGE
        rig.check_idle()


def test_aborted_while_it_waits(tiny: Pair) -> None:
    with rig_of(tiny) as rig:
        names = [rig.send(prompt(LONG), 4) for _ in range(3)]
        rig.engine.turn()
        rig.abort(names[1])
        rig.run(names[0], names[2])
        assert not rig.engine.scheduler._sharing._following
        assert not rig.engine.scheduler._sharing._leaders
        rig.check_idle()


def test_a_preempted_one_leads_nobody(tiny: Pair) -> None:
    with rig_of(tiny) as rig:
        names = [rig.send(prompt(LONG), 4) for _ in range(3)]
        rig.engine.turn()
        scheduler = rig.engine.scheduler
        scheduler._preempt(scheduler.running[0])
        answers = rig.run(*names)
        assert len({tuple(answer.tokens) for answer in answers}) == 1
        rig.check_idle()


def test_a_small_device_serves_them_all(tiny: Pair) -> None:
    """Requests that wait hold nothing; preemption and sharing do not lock each other out."""
    with rig_of(tiny, device_tokens=256) as rig:
        tokens = prompt(120)
        names = [rig.send(tokens[: 60 + 10 * (i % 7)] + prompt(9, i), 40) for i in range(12)]
        for answer in rig.run(*names):
            assert answer.finished.reason == "length"
        rig.check_idle()


def test_one_that_makes_no_progress_is_not_waited_for(
    tiny: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig_of(tiny) as rig:
        rig.send(prompt(LONG), 2)
        second = rig.send(prompt(LONG), 2)
        rig.engine.turn()
        scheduler = rig.engine.scheduler
        (waiting,) = scheduler.waiting
        assert scheduler._sharing.waits(waiting, scheduler.running)
        later = time.monotonic() + sharing.PATIENCE_SECONDS
        monkeypatch.setattr(sharing.time, "monotonic", lambda: later)
        assert not scheduler._sharing._goes_on(scheduler._sharing._following[waiting])
        monkeypatch.undo()
        assert rig.run(second)[0].finished.reason == "length"


def line_of_one_group() -> sharing.Sharing:
    kv = Component("k", layers=(0,), shape=(PAGE, 8), dtype="F32")
    return sharing.Sharing(Schema(Identity("m"), PAGE, (Group("full", (kv,)),)))


def request(name: str) -> RequestState:
    message = Generate(id=name, tokens=prompt(LONG), sampling=Sampling())
    return RequestState.of(message, 0)


def leading(name: str) -> RequestState:
    """A request that computes, as far as others see."""
    leader = request(name)
    lease: Any = SimpleNamespace(pages=0, detached=False, released=False)
    leader.lease = lease
    return leader


def test_leaders_that_end_early_do_not_starve_it() -> None:
    """Somebody who sends and aborts the same prompt for ever delays others a few times only."""
    line, victim = line_of_one_group(), request("victim")
    for number in range(2 * sharing.MOST_LEADERS):
        leader = leading(f"leader {number}")
        assert line.waits(victim, [leader]) == (number < sharing.MOST_LEADERS)
        cast("Any", leader.lease).pages = 1
        assert line.waits(victim, [leader]) == (number < sharing.MOST_LEADERS), "the same one"
        leader.lease = None


def test_one_that_makes_no_progress_is_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for another that goes on, as the first of those that waited does."""
    line, first, second = line_of_one_group(), request("first"), request("second")
    stuck = leading("stuck")
    assert line.waits(first, [stuck])
    assert line.waits(second, [stuck])
    later = time.monotonic() + sharing.PATIENCE_SECONDS
    monkeypatch.setattr(sharing.time, "monotonic", lambda: later)
    assert not line.waits(first, [stuck])
    assert not line.waits(first, [stuck]), "nor if there was no room for it"
    first.lease = leading("lends its lease").lease
    assert line.waits(second, [stuck, first])


def test_a_failed_leader_fails_alone(tiny: Pair) -> None:
    with rig_of(tiny) as rig:
        names = [rig.send(prompt(LONG), 4) for _ in range(3)]
        rig.engine.turn()
        leader: RequestState = rig.engine.scheduler.running[0]
        rig.engine._fail(leader.id, RuntimeError("planted"))
        answers = rig.run(*names)
        assert isinstance(answers[0].end, Failed)
        assert answers[1].tokens == answers[2].tokens
        assert answers[2].cached["device"] == HIT
        rig.check_idle()
