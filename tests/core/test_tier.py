"""Slots of one memory tier: ownership and eviction order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkeep.core.victims
from kvkeep.core.pages import DEVICE, NO_SLOT, PageTable
from kvkeep.core.policy import Order, lfu, lru
from kvkeep.core.tier import Tier
from kvkeep.schema import NO_IDS, InvariantError, Residence

LIVE, WRITING, ABSENT = Residence.LIVE, Residence.WRITING, Residence.ABSENT


class Room:
    """A device tier of one group, with pages at given clocks and depths."""

    def __init__(self, slots: int, order: Order = lru) -> None:
        self.table = PageTable([0], usual=8)
        self.tier = Tier(self.table, DEVICE, [slots], order)

    def add(self, used: int, depth: int = 0, state: Residence = LIVE) -> int:
        page = self.table.allocate(ids(*range(depth)), 1, [])
        self.table.used[0, page] = used
        self.tier.adopt(0, page, self.tier.reserve(0, 1), state)
        return int(page[0])

    def evict(self, count: int) -> list[int]:
        gone = self.tier.evict(0, count).tolist()
        self.tier.check()
        return gone


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.intp)


def test_reserve_is_all_or_nothing() -> None:
    tier = Room(3).tier
    slots = tier.reserve(0, 2)
    assert len(set(slots.tolist())) == 2
    assert tier.reserve(0, 2) is None
    assert (tier.free_slots(0), tier.private(0)) == (1, 2)
    tier.free(0, slots)
    assert (tier.free_slots(0), tier.private(0)) == (3, 0)
    assert tier.reserve(0, 0).tolist() == []
    tier.check()


def test_a_row_gets_its_bytes_and_only_then_may_be_pinned() -> None:
    room = Room(2)
    page = room.add(1, state=WRITING)
    with pytest.raises(InvariantError, match="not LIVE"):
        room.tier.pin(0, ids(page))
    assert room.evict(1) == []
    room.tier.publish(0, ids(page))
    assert room.table.used[0, page] == 1, "publishing stamps nothing"
    assert room.tier.pin(0, ids(page)).tolist() == [room.table.slot[0, 0, page]]
    with pytest.raises(InvariantError, match="not WRITING"):
        room.tier.publish(0, ids(page))


def test_a_pinned_row_stays_until_the_last_pin_is_gone() -> None:
    room = Room(2)
    page = ids(room.add(1))
    room.tier.pin(0, page)
    room.tier.pin(0, page)
    room.tier.unpin(0, page)
    assert room.evict(1) == []
    with pytest.raises(InvariantError, match="pinned slot is dropped"):
        room.tier.drop(0, page)
    room.tier.unpin(0, page)
    with pytest.raises(InvariantError, match="below zero"):
        room.tier.unpin(0, page)
    room.table.pins[0, 0, page] = 0
    assert room.evict(1) == page.tolist()
    assert room.table.slot[0, 0, page] == NO_SLOT


def test_what_is_dying_is_not_evicted() -> None:
    """Its users free its slot; eviction must not."""
    room = Room(1)
    room.table.dying[room.add(1)] = True
    assert room.evict(1) == []


def test_misuse_of_slots_is_refused() -> None:
    room = Room(3)
    page = ids(room.add(1))
    slot = room.table.slot[0, 0, page]
    with pytest.raises(InvariantError, match="not private"):
        room.tier.free(0, slot)
    with pytest.raises(InvariantError, match="not private"):
        room.tier.adopt(0, ids(5), slot, LIVE)
    with pytest.raises(InvariantError, match="second slot"):
        room.tier.adopt(0, page, room.tier.reserve(0, 1), LIVE)
    room.tier.drop(0, page)
    with pytest.raises(InvariantError, match="does not own its slot"):
        room.tier.drop(0, page)


def test_the_oldest_goes_first_and_among_equals_the_deepest() -> None:
    room = Room(5)
    new, top, deep = room.add(9), room.add(2, depth=0), room.add(2, depth=1)
    old = room.add(1)
    assert room.evict(3) == [old, deep, top]
    assert room.evict(3) == [new]
    assert room.tier.evicted == [4]


def test_late_comers_below_the_horizon_are_merged_in(monkeypatch) -> None:
    """An older page that becomes evictable after a batch was sorted is evicted in its order."""
    monkeypatch.setattr(kvkeep.core.victims, "_SELECT", 0.5)
    room = Room(8)
    pages = [room.add(used) for used in (10, 20, 30, 40, 50, 60)]
    room.tier.pin(0, ids(pages[1]))
    assert room.evict(1) == [pages[0]]  # the batch ends at 50
    room.tier.unpin(0, ids(pages[1]))
    late = room.add(25)
    assert room.evict(5) == [pages[1], late, *pages[2:5]]


def test_what_was_used_since_it_was_chosen_is_passed_over(monkeypatch) -> None:
    monkeypatch.setattr(kvkeep.core.victims, "_SELECT", 0.5)
    room = Room(8)
    pages = [room.add(used) for used in (1, 2, 3, 4, 5, 6)]
    assert room.evict(1) == pages[:1]
    room.table.used[0, pages[1]] = 99
    assert room.evict(5) == [*pages[2:], pages[1]]


def test_a_page_offered_twice_is_dropped_once(monkeypatch) -> None:
    monkeypatch.setattr(kvkeep.core.victims, "_SELECT", 0.5)
    room = Room(8)
    pages = [room.add(used) for used in (1, 2, 3, 4, 5)]
    assert room.evict(1) == pages[:1]
    for _ in range(3):
        room.tier.pin(0, ids(pages[2]))
        room.tier.unpin(0, ids(pages[2]))
    assert room.evict(8) == pages[1:]


def test_several_groups_at_once_are_as_one_after_another() -> None:
    """The table grows meanwhile, and the groups have different slots."""
    together, apart = several(4), several(4)
    for step in (0, 1, 2):
        pages = together.table.allocate(NO_IDS, 3 << (4 * step), [])
        assert apart.table.allocate(NO_IDS, len(pages), []).tolist() == pages.tolist()
        slots = together.reserve((1, 3), len(pages))
        singly = np.stack([apart.reserve(g, len(pages)) for g in (1, 3)])
        assert slots.dtype == singly.dtype
        assert slots.tolist() == singly.tolist()
        together.adopt((1, 3), pages, slots, WRITING)
        together.publish((1, 3), pages)
        together.pin(3, pages[:1])
        pinned = together.pin((1, 3), pages)
        assert pinned.dtype == slots.dtype
        assert pinned.tolist() == slots.tolist()
        for g in (1, 3):
            apart.adopt(g, pages, singly[g // 2], LIVE)
            apart.pin(g, pages)
        apart.pin(3, pages[:1])
        alike(together, apart)
        with pytest.raises(InvariantError, match="pinned slot is dropped"):
            together.drop((1, 3), pages)
        together.unpin((1, 3), pages)
        together.drop((1, 3), pages[1:])
        together.free((0, 2), together.reserve((0, 2), 5))
        for g in (1, 3):
            apart.unpin(g, pages)
            apart.drop(g, pages[1:])
            apart.free(g - 1, apart.reserve(g - 1, 5))
        alike(together, apart)
        with pytest.raises(InvariantError, match="below zero"):
            together.unpin((1, 3), pages)
    assert together.reserve((0, 1), together.free_slots(1) + 1) is None, "all groups or none"
    assert [together.private(g) for g in range(4)] == [0, 0, 0, 0]


def several(groups: int) -> Tier:
    """A tier in which group ``g`` has ``2000 + g`` slots."""
    table = PageTable([0] * groups, usual=8)
    return Tier(table, DEVICE, range(2000, 2000 + groups), lru)


def alike(a: Tier, b: Tier) -> None:
    for tier in (a, b):
        tier.check()
        tier.table.check()
    for column in ("slot", "state", "pins"):
        assert (getattr(a.table, column) == getattr(b.table, column)).all()
    for g in range(4):
        assert a.available(g) == b.available(g)
        assert a._free[g].ids.tolist() == b._free[g].ids.tolist()


Action = st.tuples(st.sampled_from("apuseh"), st.integers(0, 30), st.integers(0, 9))


@pytest.mark.untraced
@pytest.mark.parametrize("order", [lru, lfu])
@settings(max_examples=200)
@given(
    st.lists(Action, min_size=30, max_size=60),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.sampled_from([1, 3, 99]),
)
def test_victims_come_in_order(order: Order, actions, select: float, block: int) -> None:
    """Whatever is added, pinned, unpinned, used, hit or evicted, eviction sorts all evictable
    pages, however many pages a scan takes at a time.

    Clocks only grow, as in the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvkeep.core.victims, "_SELECT", select)
        patch.setattr(kvkeep.core.victims, "_BLOCK", block)
        patch.setattr(kvkeep.core.victims, "_SAMPLE", block + 1)
        patch.setattr(kvkeep.core.victims, "_MOST_OFFERED", block)
        _compare(order, actions)


def _compare(by: Order, actions) -> None:
    room, live, clock = Room(12, by), {}, 0
    for action, number, depth in actions:
        page = sorted(live)[number % len(live)] if live else None
        if action == "a" and room.tier.free_slots(0):
            clock += 1
            live[room.add(clock, depth)] = 0
        elif action == "e":
            table = room.table
            order = sorted((p for p in live if not live[p]), key=lambda p: by(table, 0, ids(p)))
            gone = room.evict(number % 4)
            assert gone == order[: number % 4]
            for p in gone:
                del live[p]
        elif page is None:
            continue
        elif action == "p":
            room.tier.pin(0, ids(page))
            live[page] += 1
        elif action == "u" and live[page]:
            room.tier.unpin(0, ids(page))
            live[page] -= 1
        elif action == "s":
            clock += 1
            room.table.used[0, page] = clock
        elif action == "h":
            room.table.reused[page] += depth
    assert np.flatnonzero(room.table.slot[0, 0] != NO_SLOT).tolist() == sorted(live)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tier: tier._free[0].give(tier._free[0].take(1).repeat(2)), "free list"),
        (lambda tier: tier._free[0].take(1), "leaked"),
        (lambda tier: tier._owner[0].__setitem__(0, 3), "disagree"),
        (lambda tier: tier._owner[0].__setitem__(tier._free[0].ids[0], -2), "free list"),
    ],
    ids=["twice", "leak", "owner", "free and private"],
)
def test_check_sees_damage(spoil, message: str) -> None:
    room = Room(3)
    room.add(1)
    room.tier.check()
    spoil(room.tier)
    with pytest.raises(InvariantError, match=message):
        room.tier.check()
