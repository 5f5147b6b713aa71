"""State that is not worth reading or loading: short parts, and parts faster to recompute."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
from request import Request
from schemas import ABSENT, FOUR, TWO
from test_policies import A, B, PolicyWorld, pages, serve, world_of
from walks import STEPS, one, watch

from kvkeep.core import prefetch as prefetch_room
from kvkeep.core import speed as speed_room
from kvkeep.core.policy import Policy
from kvkeep.core.speed import Speed
from kvkeep.schema import ConfigError

RECORD = TWO.groups[0].record_bytes
SHORT, SLOW, SLOW_LOAD = (
    f"skipped_tokens_total{{why={why}}}" for why in ("short", "slow", "slow_load")
)


def stored(policy: Policy | None = None, prompts=(A,), min_tokens: int = 0) -> PolicyWorld:
    """A world with these prompts only in storage: 6 tokens, 3 pages of 2 groups each."""
    w = world_of(policy or Policy(), TWO, [8, 8], [16, 16])
    for tokens in prompts:
        serve(w, tokens)
    type(w).min_tokens = min_tokens
    w.restart()
    return w


def measured(w: PolicyWorld, lane: str, prompt: float, moved: float | None = None) -> None:
    """Set the seconds that 6 tokens take to compute and 6 records to move. Test lanes take no
    time, so their own measurements change little."""
    w.cache.observe_prefill(6, prompt)
    if moved is not None:
        w.inside.speed(lane).observe(6 * RECORD, moved)


def answered(w: PolicyWorld, tokens=A) -> Request:
    """A request whose lookup was answered."""
    request = w.arrive(tokens)
    w.step("read", len(w.lanes["read"].queue) - 1)
    w.tick()
    return request


def reading(w: PolicyWorld) -> int:
    """The number of records in flight from storage."""
    return sum(len(move.pages) for ticket in w.inside.reading() for move in ticket.moves)


# --- short


@pytest.mark.parametrize(("least", "read"), [(0, True), (6, True), (7, False)])
def test_a_short_prompt_is_not_asked_for(least: int, read: bool) -> None:
    w = stored(min_tokens=least)
    request = w.arrive(A)
    assert bool(w.lanes["read"].queue) == read
    assert request.prefetch.waits == read
    w.settle()
    assert pages(w, 1, request) == ([0, 1, 2] if read else [])


def test_what_storage_has_is_too_short() -> None:
    w = stored(min_tokens=6)
    for key in [key for key in w.store.records if w.names[key.page] == ("", tuple(A[:6]))]:
        del w.store.records[key]  # the third page
    request = answered(w)
    assert w.cache.ready(request.prefetch)
    assert reading(w) == 0
    assert w.cache.counts[SHORT] == 4


def test_what_memory_has_does_not_count() -> None:
    w = stored(min_tokens=4)
    serve(w, A[:5])
    request = w.arrive(A)  # one page more
    assert w.cache.ready(request.prefetch)
    assert w.admit(request)
    assert request.lease.pages == 2


def test_the_minimum_is_checked() -> None:
    assert Policy().prefetch_min_tokens == 256
    with pytest.raises(ConfigError, match="prefetch_min_tokens must be at least 0"):
        Policy(prefetch_min_tokens=-1)


# --- slow storage


@pytest.mark.parametrize(("seconds", "policy", "read"), [
    (50.0, "auto", True), (70.0, "auto", False), (70.0, "never", True), (None, "auto", True),
])  # fmt: skip
def test_what_computes_faster_is_not_read(seconds, policy: str, read: bool) -> None:
    w = stored(Policy(recompute=policy))
    measured(w, "read", 60.0, seconds)
    request = answered(w)
    assert request.prefetch.waits == read
    assert reading(w) == (6 if read else 0)
    assert w.cache.counts[SLOW] == (0 if read else 6)
    w.settle()
    assert w.admit(request)
    assert request.lease.pages == (3 if read else 0)


def test_nothing_is_compared_before_a_prompt_was_computed() -> None:
    w = stored()
    w.inside.speed("read").observe(1, 1e9)
    assert answered(w).prefetch.waits


def test_what_waits_before_it_counts() -> None:
    w = stored(prompts=(A, B))
    measured(w, "read", 60.0, 50.0)
    first, second = answered(w), answered(w, B)
    assert first.prefetch.waits
    assert not second.prefetch.waits
    assert reading(w) == 6


def test_a_read_that_turns_slow_is_given_up() -> None:
    w = stored()
    measured(w, "read", 60.0)
    request = answered(w)
    (ticket,) = w.lanes["read"].queue
    assert not w.cache.ready(request.prefetch)
    measured(w, "read", 60.0, 70.0)
    w.tick()
    assert w.cache.ready(request.prefetch)
    assert ticket.abandoned
    assert w.cache.counts[SLOW] == 6
    w.settle()
    assert w.cache.ready(request.prefetch), "it waits again"
    assert w.admit(request)
    w.check()


def test_who_gave_up_does_not_wait_for_another_of_its_reads() -> None:
    w = stored()
    first, second = answered(w, A[:5]), answered(w)  # one page more
    measured(w, "read", 60.0, 600.0)
    w.tick()
    assert w.cache.ready(first.prefetch)
    assert w.cache.ready(second.prefetch)
    w.step("read")
    w.tick()
    assert len(second.prefetch.reads) == 1
    assert w.cache.ready(second.prefetch)
    assert w.cache.counts[SLOW] == 4 + 6, "it gave up again"


def test_whoever_is_read_first_does_not_wait_for_the_rest() -> None:
    w = stored(prompts=(A, B))
    measured(w, "read", 60.0)
    first, second = answered(w), answered(w, B)
    measured(w, "read", 60.0, 50.0)
    w.tick()
    assert not w.cache.ready(first.prefetch)
    assert w.cache.ready(second.prefetch)


def test_a_read_goes_on_while_anybody_waits() -> None:
    w = stored()
    first, second = answered(w), w.arrive([*A[:4], 9])
    (ticket,) = w.lanes["read"].queue
    w.cache.observe_prefill(1, 10.0)
    w.inside.speed("read").observe(6 * RECORD, 50.0)  # of 4 tokens to gain, or 6
    w.tick()
    assert w.cache.ready(second.prefetch)
    assert not w.cache.ready(first.prefetch)
    assert not ticket.abandoned


def test_what_was_given_up_is_read_again_for_who_comes_later() -> None:
    """An abandoned read cannot be joined: only its lane knows whether it is skipped."""
    w = stored()
    answered(w)
    (ticket,) = w.lanes["read"].queue
    measured(w, "read", 60.0, 70.0)
    w.tick()
    assert ticket.abandoned
    w.inside.speed("read").observe(1e9 * RECORD, 1.0)
    later = w.arrive(A)
    assert later.prefetch.waits
    w.settle()
    assert w.admit(later)
    assert later.lease.pages == 3
    w.finish()


def test_a_question_that_takes_long_is_not_waited_for() -> None:
    w = stored()
    measured(w, "read", 60.0)
    request = w.arrive(A)
    w.tick()
    assert not w.cache.ready(request.prefetch)
    request.prefetch.begun -= 61.0
    w.tick()
    assert w.cache.ready(request.prefetch)
    assert w.cache.counts[SLOW] == 0, "nobody knows whether storage has it"
    w.step("read")
    w.tick()
    assert w.cache.ready(request.prefetch), "it waits again"
    assert reading(w) == 0, "an answer that came too late starts a read"
    w.settle()
    assert not w.store.reads
    assert pages(w, 1, request, ABSENT) == []


def test_a_slow_store_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a prefetch reads a few pages, for which no request waits."""
    monkeypatch.setattr(prefetch_room, "_TRIAL_BYTES", 4 * RECORD)
    w = stored()
    measured(w, "read", 60.0, 70.0)
    monkeypatch.setattr(speed_room, "_RETRY_SECONDS", 0.0)
    request = answered(w)
    assert w.cache.ready(request.prefetch)
    assert reading(w) == 4  # two pages
    monkeypatch.setattr(speed_room, "_RETRY_SECONDS", 1e9)
    w.release(request)
    other = answered(w)
    assert reading(w) == 4, "another trial"
    w.settle()
    assert pages(w, 1, other) == [0, 1]
    w.check()


def test_one_at_a_time_tries_a_slow_store() -> None:
    w = stored(prompts=(A, B))
    measured(w, "read", 60.0, 70.0)
    w.inside.speed("read")._tried = -math.inf
    assert w.cache.ready(answered(w).prefetch)
    assert reading(w) == 6
    assert w.cache.ready(answered(w, B).prefetch)
    assert reading(w) == 6, "the first try is not back yet"


# --- slow loads


def test_a_load_that_finds_no_room_is_no_try(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world_of(Policy(), TWO, [8, 8], [8, 8])
    serve(w, A)
    w.empty(0)
    measured(w, "load", 60.0, 70.0)
    monkeypatch.setattr(speed_room, "_RETRY_SECONDS", -1.0)
    others = w.cache.admit(np.array(B, np.int32), chunk=len(B))
    w.cache.grow(others, 16)
    assert w.cache.admit(np.array(A, np.int32), chunk=7) is None
    assert w.inside.speed("load").stale
    w.cache.release(others)


@pytest.mark.parametrize(("seconds", "loads"), [(50.0, True), (70.0, False)])
def test_what_computes_faster_is_not_loaded(seconds: float, loads: bool) -> None:
    w = world_of(Policy(), TWO, [8, 8], [8, 8])
    serve(w, A)
    w.empty(0)
    measured(w, "load", 60.0, seconds)
    lease = w.cache.admit(np.array(A, np.int32), chunk=7)
    assert lease.pages == (3 if loads else 0)
    assert lease.ready != loads
    w.settle()
    assert lease.explanation.skipped == w.cache.counts[SLOW_LOAD] == (0 if loads else 6)
    w.cache.release(lease)
    w.cache.check()


def test_what_is_on_the_device_is_used_all_the_same() -> None:
    w = world_of(Policy(), TWO, [8, 8], [8, 8])
    serve(w, A)
    w.evict(0, 0, 1)
    measured(w, "load", 60.0, 1e6)
    lease = w.cache.admit(np.array(A, np.int32))
    assert (lease.pages, lease.ready, lease.explanation.skipped) == (2, True, 2)


def test_a_slow_load_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    w = world_of(Policy(), TWO, [8, 8], [8, 8])
    serve(w, A)
    w.empty(0)
    measured(w, "load", 60.0, 70.0)
    monkeypatch.setattr(speed_room, "_RETRY_SECONDS", 0.0)
    assert w.cache.admit(np.array(A, np.int32)).pages == 3


# --- in any order


@pytest.mark.untraced
def test_random_walks() -> None:
    """Speeds change at any time: reads are skipped, abandoned and retried."""
    happened: Counter[str] = Counter()
    for seed in range(24):
        rng = random.Random(seed)
        w = world_of(Policy(), FOUR, [8, 7, 6, 8], [9, 8, 7, 9])
        mix = STEPS | {"restart": 2, "arrive": 7, "run": 10, "speed": 4}
        for n, step in enumerate(rng.choices(list(mix), list(mix.values()), k=200)):
            if step == "speed":
                measured(w, "read", 1.0, rng.choice([1e-3, 1.0, 1e3]))
                w.inside.speed("read")._tried -= rng.choice([0.0, 100.0])
            else:
                happened["skipped"] += w.cache.counts.pop(SLOW, 0)
                one(w, step, rng)
            watch(w, n)
        w.finish()
        happened += w.happened
    assert happened["skipped"]
    assert happened["read lands"]


# --- measured speeds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test advances."""
    clock = [100.0]
    monkeypatch.setattr(speed_room.time, "monotonic", lambda: clock[0])
    return clock


def test_speed_is_a_mean_that_forgets(now: list[float]) -> None:
    speed = Speed()
    assert speed.seconds(10) is None
    speed.observe(0, 5.0)
    assert speed.seconds(10) is None, "nothing tells nothing"
    speed.observe(10, 1.0)
    assert speed.seconds(10) == 1.0
    speed.observe(10, 3.0)
    assert speed.seconds(10) == 2.0
    now[0] += 5.0
    speed.observe(10, 1.0)  # the half of 20 in 4, and 10 in 1
    assert speed.seconds(10) == 1.5
    now[0] += 3600.0
    speed.observe(10, 7.0)
    assert speed.seconds(10) == pytest.approx(7.0)


def test_what_is_under_way_tells_at_once(now: list[float]) -> None:
    speed = Speed()
    with speed.under_way(10):
        now[0] += 4.0
        assert speed.seconds(20) == 8.0
        speed.observe(10, 5.0)
        assert speed.seconds(20) == 10.0, "it is early yet"
        now[0] += 2.0
        assert speed.seconds(20) == 12.0
    assert speed.seconds(20) == 10.0


def test_one_is_to_try_again(now: list[float]) -> None:
    speed = Speed()
    speed.observe(1, 1.0)
    now[0] += 10.0
    assert not speed.stale
    now[0] += 0.1
    assert speed.stale
    speed.tried()
    assert not speed.stale, "two try"


def test_a_try_that_is_fast_outweighs_what_was_slow_long_ago(now: list[float]) -> None:
    speed = Speed()
    speed.observe(10, 100.0)
    for _ in range(4):
        now[0] += 20.0  # four half-lives
        assert speed.stale
        speed.observe(10, 0.001)
    assert speed.seconds(10) < 0.1
