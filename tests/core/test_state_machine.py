"""The cache against its oracle: any operations in any order, with any failure.

:mod:`world` defines what is compared after every step, and :mod:`walks` when it is audited.
"""

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from walks import KINDS, LANES, walk, watch

pytestmark = pytest.mark.untraced

Pick = st.integers(0, 63)
Tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=13)
Fault = st.sampled_from(["", "", "", "partial", "raise"])


class Machine(RuleBasedStateMachine):
    """One world, whose kind is a class attribute."""

    kind = "two"

    @initialize()
    def start(self) -> None:
        self.world, self.steps = KINDS[self.kind](random.Random(0)), 0

    def request(self, pick: int):
        return self.world.requests[pick % len(self.world.requests)]

    @precondition(lambda self: len(self.world.requests) < 5)
    @rule(tokens=Tokens, namespace=st.sampled_from(["", "b"]), ask=st.booleans())
    def arrive(self, tokens: list[int], namespace: str, ask: bool) -> None:
        self.world.arrive(tokens, namespace, ask)

    @precondition(lambda self: any(not r.lease for r in self.world.requests))
    @rule(pick=Pick, chunk=st.integers(0, 4))
    def admit(self, pick: int, chunk: int) -> None:
        waiting = [r for r in self.world.requests if not r.lease]
        self.world.admit(waiting[pick % len(waiting)], chunk)

    @precondition(lambda self: any(r.lease for r in self.world.requests))
    @rule(
        pick=Pick,
        count=st.integers(0, 6),
        ahead=st.integers(0, 4),
        commit=st.booleans(),
        stop=st.sampled_from([True, True, True, False]),
    )
    def run_and_commit(self, pick: int, count: int, ahead: int, commit: bool, stop: bool) -> None:
        running = [r for r in self.world.requests if r.lease]
        self.world.run(running[pick % len(running)], count, ahead, commit, stop)

    @precondition(lambda self: self.world.requests)
    @rule(pick=Pick, again=st.booleans())
    def release(self, pick: int, again: bool) -> None:
        self.world.release(self.request(pick), again)

    @precondition(lambda self: any(lane.queue for lane in self.world.lanes.values()))
    @rule(lane=st.sampled_from(LANES), first=Pick, count=st.integers(1, 4), fault=Fault)
    def step(self, lane: str, first: int, count: int, fault: str) -> None:
        self.world.step(lane, first, count, fault)

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @rule(tier=st.integers(0, 1), pick=Pick, count=st.integers(1, 4))
    def evict(self, tier: int, pick: int, count: int) -> None:
        self.world.evict(tier, pick % len(self.world.groups), count)

    @rule(tier=st.sampled_from([0, 0, 1]))
    def empty(self, tier: int) -> None:
        self.world.empty(tier)

    @precondition(lambda self: self.world.store.records)
    @rule(pick=Pick)
    def lose(self, pick: int) -> None:
        self.world.lose(pick)

    @rule(on=st.booleans())
    def outage(self, on: bool) -> None:
        self.world.outage(on)

    @precondition(lambda self: self.world.store.records)
    @rule()
    def restart(self) -> None:
        self.world.restart()

    @invariant()
    def check(self) -> None:
        watch(self.world, self.steps)
        self.steps += 1

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


def machine(kind: str, examples: int, steps: int) -> type:
    """The test case of one kind of world, with the same examples in every run."""
    case = type(f"Machine_{kind}", (Machine,), {"kind": kind}).TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
    )
    return case


TestFullAndDraft = machine("two", 50, 50)
TestFourGroups = machine("four", 50, 50)
TestSnapshots = machine("five", 50, 50)
TestNoGroupIsVital = machine("no vital", 30, 50)
TestLenient = machine("lenient", 30, 50)


@pytest.mark.parametrize("kind", list(KINDS))
def test_random_walks(kind: str) -> None:
    """Long walks find what short, shrinkable examples miss, and reach every kind of event."""
    happened: Counter[str] = Counter()
    for seed in range(20):
        happened += walk(kind, seed)
    for what in ("hit", "loading", "load lands", "evicted", "refused", "no room to grow"):
        assert happened[what], f"no walk came to {what!r}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_many_random_walks(kind: str) -> None:
    """The same, for minutes."""
    for seed in range(1000, 1500):
        walk(kind, seed, 300)
