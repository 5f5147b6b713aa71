"""The audit mends bookkeeping, whatever broke and whenever."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from request import true_key
from schemas import ABSENT, FOUR, LIVE, TWO, WRITING, P
from walks import KINDS, LANES, STEPS, one, watch
from world import World

from kvkeep.schema import NO_IDS, InvariantError, root_key

FREE, PRIVATE = -1, -2
Place = tuple[int, int, int]  # tier, group, page


def places(w: World, *states: int) -> list[Place]:
    return [tuple(at) for at in np.argwhere(np.isin(w.table.state, states)).tolist()]


def tier_of(w: World, place: Place):
    return (w.cache.residency.device, w.cache.residency.host)[place[0]]


def in_table(column: str, *states: int, value: Callable) -> Callable:
    """Damage one cell of a row that is in one of these states."""

    def spoil(w: World, rng: random.Random) -> None:
        if found := places(w, *states):
            place = rng.choice(found)
            getattr(w.table, column)[place] = value(w, rng, place)

    return spoil


def of_page(column: str, value: Callable) -> Callable:
    """Damage one cell of a page in the tree."""

    def spoil(w: World, rng: random.Random) -> None:
        if tree := w.tree():
            getattr(w.table, column)[..., rng.choice(list(tree.values()))] = value(rng)

    return spoil


def owner(value: Callable) -> Callable:
    """Give a row's slot to another owner."""

    def spoil(w: World, rng: random.Random) -> None:
        if found := places(w, WRITING, LIVE):
            place = rng.choice(found)
            tier_of(w, place)._owner[place[1]][w.table.slot[place]] = value(rng)

    return spoil


def vanish(w: World, rng: random.Random) -> None:
    if found := places(w, WRITING, LIVE):
        place = rng.choice(found)
        w.table.slot[place], w.table.state[place] = -1, ABSENT


def free_list(change: Callable) -> Callable:
    def spoil(w: World, rng: random.Random) -> None:
        place = rng.randrange(2), rng.choice(w.groups), 0
        free = tier_of(w, place)._free[place[1]]
        if len(free):
            change(free, rng, tier_of(w, place).capacity[place[1]])

    return spoil


def twice(free, rng: random.Random, capacity: int) -> None:
    free._stack[rng.randrange(len(free))] = rng.randrange(capacity)


def leak(free, rng: random.Random, capacity: int) -> None:
    free._size -= 1


def busy(w: World, rng: random.Random) -> None:
    place = rng.randrange(2), rng.choice(w.groups), 0
    tier_of(w, place)._busy[place[1]] += rng.choice([-2, -1, 1, 2])


def another(w: World, rng: random.Random, place: Place) -> int:
    """The slot of another row of this tier and group, if any."""
    slots = [w.table.slot[at] for at in places(w, WRITING, LIVE) if at[:2] == place[:2]]
    return rng.choice(slots)


def any_slot(w: World, rng: random.Random, place: Place) -> int:
    return rng.randrange(tier_of(w, place).capacity[place[1]])


DAMAGE = {
    "a row without a slot": in_table("slot", WRITING, LIVE, value=lambda *_: -1),
    "a slot without a state": in_table("state", WRITING, LIVE, value=lambda *_: ABSENT),
    "neither": vanish,
    "two rows with one slot": in_table("slot", WRITING, LIVE, value=another),
    "a row elsewhere": in_table("slot", WRITING, LIVE, value=any_slot),
    "a slot of a row that is absent": in_table("slot", ABSENT, value=any_slot),
    "a state of a row that is absent": in_table("state", ABSENT, value=lambda *_: LIVE),
    "filled by nobody": in_table("state", LIVE, value=lambda *_: WRITING),
    "filled too early": in_table("state", WRITING, value=lambda *_: LIVE),
    "another owner": owner(lambda rng: rng.randrange(8)),
    "no owner": owner(lambda rng: rng.choice([FREE, PRIVATE])),
    "a free slot that is not": free_list(twice),
    "a slot that leaked": free_list(leak),
    "slots in use": busy,
    "pins": in_table("pins", ABSENT, WRITING, LIVE, value=lambda w, rng, _: rng.choice([0, 5])),
    "holds": of_page("holds", lambda rng: rng.choice([0, 7])),
    "dying": of_page("dying", lambda rng: True),
    "depth": of_page("depth", lambda rng: rng.choice([0, 1, 9])),
    "parent": of_page("parent", lambda rng: rng.choice([-1, 0, 5])),
    "clock": of_page("used", lambda rng: rng.choice([0, 10**6])),
}


def slotless(w: World, rng: random.Random) -> None:
    """Add a page to the tree without slots, like a step that broke half way."""
    path = "", (9,) * P
    w.names[true_key(path)] = path
    raw = np.full(P, 9, "<i4").tobytes()
    w.cache.residency.add(root_key(""), NO_IDS, raw, [true_key(path)])


DAMAGE["a page without slots"] = slotless
OF_IDS = ("dying", "depth")  # no operation notices this damage in time


def world(seed: int) -> tuple[World, random.Random]:
    """A world in the middle of random work."""
    rng = random.Random(seed)
    w = KINDS[rng.choice(list(KINDS))](rng)
    w._check_written = lambda: None  # pages that were in line when something broke are not written
    for step in rng.choices(list(STEPS), list(STEPS.values()), k=rng.randrange(20, 60)):
        one(w, step, rng)
    w.check()
    return w, rng


def stumble(w: World) -> None:
    """Report broken bookkeeping."""
    w.inside.stumble(InvariantError("planted"))
    w.cache.tick()
    w.cache.check()


def preempt_lost(w: World) -> None:
    for request in w.requests:
        if request.lease and request.lease.released:
            w.release(request, again=True)


def check_tickets(w: World) -> None:
    """Tickets own the slots that they read and fill, even if their pages lost them."""
    for kind, move in w.inside.moves():
        source, target = int(kind != "save"), int(kind != "load")
        for tier, slots in (source, move.source), (target, move.target):
            owners = tier_of(w, (tier, 0, 0))._owner[move.group][slots]
            mine = (owners == PRIVATE) | (owners == move.pages[: len(slots)])
            assert all(mine), "a slot in flight is given away"


def land(w: World, rng: random.Random) -> None:
    """Let every ticket land; outcomes that cannot be applied are dropped."""
    for _ in range(300):
        w.cache.tick()
        w.cache.check()
        check_tickets(w)
        preempt_lost(w)
        if not w.inside.busy:
            return
        lanes = [name for name in LANES if w.lanes[name].queue]
        if lanes:
            w.step(rng.choice(lanes), rng.randrange(9), fault=rng.choice(["", "", "partial"]))
    raise AssertionError("transfers never end")


def trust(w: World) -> None:
    """Copy the table's clocks into the oracle."""
    w.cache.counts["invariant_errors_total"] = 0
    w.trust()


def go_on(w: World, rng: random.Random) -> None:
    """What is left is sound: requests run to their end with right bytes."""
    check_tickets(w)
    preempt_lost(w)
    land(w, rng)
    trust(w)
    w.check()
    for n, step in enumerate(rng.choices(list(STEPS), list(STEPS.values()), k=40)):
        one(w, step, rng)
        watch(w, n)
    w.finish()


def serve(w: World, rng: random.Random) -> None:
    """Serve one more request; no call may raise."""
    request = w.arrive([int(rng.random() < 0.3) for _ in range(rng.randrange(1, 14))], ask=False)
    request.lease = w.cache.admit(request.array, chunk=rng.randrange(5))
    for _ in range(3):
        w.step(rng.choice(LANES), 0, 99, rng.choice(["", "", "partial"]))
        w.cache.tick()
    lease = request.lease
    if lease and lease.ready and w.cache.grow(lease, len(request.tokens)):
        request.computed = lease.pages * P
        w._compute(request, len(request.tokens), 0)
        w.cache.commit(lease, request.array, request.snapshots)
    w.release(request)
    if w.requests and rng.random() < 0.3:
        w.release(rng.choice(w.requests))
    if rng.random() < 0.2:
        w.cache.evict(rng.choice(["device", "host"]))


class Clumsy:
    """Makes operations of tiers raise now and then, before or after their work."""

    def __init__(self, w: World, rng: random.Random) -> None:
        self.rng, self.awake = rng, True
        for tier in (w.cache.residency.device, w.cache.residency.host):
            for verb in ("reserve", "free", "adopt", "publish", "drop", "pin", "unpin"):
                setattr(tier, verb, self.breaking(getattr(tier, verb)))
        self.mend = w.cache._audit.mend
        w.cache._audit.mend = self.mended

    def breaking(self, verb: Callable) -> Callable:
        def run(*args):
            self.stumble()
            answer = verb(*args)
            self.stumble()
            return answer

        return run

    def stumble(self) -> None:
        if self.awake and self.rng.random() < 0.03:
            raise InvariantError("planted")

    def mended(self) -> None:
        awake, self.awake = self.awake, False
        self.mend()
        self.awake = awake


@pytest.mark.untraced
@pytest.mark.parametrize("damage", list(DAMAGE))
def test_what_broke_is_mended_and_requests_go_on(damage: str) -> None:
    """Nothing is leaked, and tickets keep their slots."""
    for seed in range(15):
        w, rng = world(seed)
        DAMAGE[damage](w, rng)
        stumble(w)
        go_on(w, rng)


@pytest.mark.untraced
@pytest.mark.parametrize("damage", [name for name in DAMAGE if name not in OF_IDS])
def test_damage_that_nobody_looks_for_raises_nothing(damage: str) -> None:
    """An operation notices the damage sooner or later, and then it is mended."""
    for seed in range(15):
        w, rng = world(seed)
        w._compute = lambda *_: None  # damage would let it write into slots that others read
        DAMAGE[damage](w, rng)
        for _ in range(10):
            serve(w, rng)
        stumble(w)
        land(w, rng)


@pytest.mark.untraced
def test_steps_that_break_half_way_are_mended() -> None:
    """At whatever point they raise."""
    broke = 0
    for seed in range(80):
        w, rng = world(seed)
        clumsy = Clumsy(w, rng)
        for _ in range(5):
            serve(w, rng)
        broke += w.cache.counts["invariant_errors_total"]
        clumsy.awake = False
        w.cache.tick()
        w.cache.check()
        go_on(w, rng)
    assert broke > 100


def test_a_row_that_breaks_while_room_is_made_costs_its_page() -> None:
    """It does not break every later tick."""
    w = World(TWO, [32, 32], [6, 6])
    for n in range(1, 6):
        request = w.arrive([n] * 5, ask=False)
        assert w.admit(request, 5)
        assert w.run(request, 5)
        w.release(request)
        if n == 3:  # the host is full
            w.settle()
            w.table.slot[1, 0, w.tree()["", (1,) * 4]] = -1
    w.cache.tick()
    assert w.cache.counts["invariant_errors_total"] == 1
    w.cache.check()
    assert ("", (1,) * 2) in w.tree()
    assert ("", (1,) * 4) not in w.tree()
    w.settle()
    assert w.cache.counts["invariant_errors_total"] == 1


def test_a_page_that_lost_its_slot_gets_no_other() -> None:
    """A ticket that lands on the first slot would unpin the second."""
    w = World(FOUR, [8] * 4, [8] * 4)
    request = w.arrive([1] * 3, ask=False)
    assert w.admit(request, 3)
    assert w.run(request, 3)
    w.tick()
    w.step("save", 0, 99)
    w.tick()
    assert w.inside.busy  # the write
    page = w.tree()["", (1, 1)]
    w.table.slot[1, 3, page], w.table.state[1, 3, page] = -1, ABSENT
    stumble(w)
    assert w.tree() == {}
    w.release(request)
    land(w, random.Random(0))


def test_a_prefetch_loses_what_it_kept() -> None:
    w = World(TWO, [8, 8], [8, 8])
    done = w.arrive([1] * 5, ask=False)
    assert w.admit(done, 5)
    assert w.run(done, 5)
    w.settle()
    w.restart()
    request = w.arrive([1] * 5)
    w.settle()
    w.table.slot[1, 1, w.tree()["", (1, 1)]] = -1
    stumble(w)
    w.cache.cancel(request.prefetch)
    assert w.cache.counts["invariant_errors_total"] == 1
    w.cache.check()


@pytest.mark.parametrize("verb", ["reserve", "adopt"])
def test_a_lease_that_breaks_is_released(verb: str) -> None:
    """During grow or commit: the engine admits the request again."""
    w = World(TWO, [8, 8], [8, 8])
    request = w.arrive([1] * 5, ask=False)
    assert w.admit(request, 2)
    lease, device = request.lease, w.cache.residency.device
    done = getattr(device, verb)

    def breaks(*args) -> None:
        done(*args)
        raise InvariantError("planted")

    setattr(device, verb, breaks)
    assert w.cache.grow(lease, 5) == (verb == "adopt")
    w.cache.commit(lease, request.array)
    setattr(device, verb, done)
    assert lease.released
    w.cache.tick()
    w.cache.check()
    assert w.cache.counts["invariant_errors_total"] == 1
    assert device.free_slots(0) == device.free_slots(1) == 8
    assert w.cache.admit(request.array, chunk=5)


def test_victims_of_an_eviction_that_broke_go_first() -> None:
    w = World(TWO, [8, 8], [0, 0])
    for n in range(4):
        request = w.arrive([n] * 3, ask=False)
        assert w.admit(request, 3)
        assert w.run(request, 3)
        w.release(request)
    assert len(w.cache.residency.device.victims(0, 2)) == 2
    stumble(w)
    w.evict(0, 0, 1)
    w.evict(0, 0, 3)


def test_pages_that_broke_are_dropped_once() -> None:
    """And not those that get their ids later."""
    w = World(TWO, [8, 8], [8, 8])

    def compute(token: int) -> np.ndarray:
        request = w.arrive([token] * 5, ask=False)
        assert w.admit(request, 5)
        assert w.run(request, 5)
        path = request.lease.path
        w.release(request)
        w.settle()
        return path

    broken = compute(1)
    with w.inside.audit.guard(broken):
        raise InvariantError("planted")
    w.cache.tick()
    assert not w.tree()
    assert set(compute(2)) == set(broken)
    w.cache.tick()
    assert len(w.tree()) == 2
    w.cache.check()
