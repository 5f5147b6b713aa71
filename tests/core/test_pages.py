"""The page table: ids are given out, kept while held, and come back fresh."""

import numpy as np
import pytest

from kvkeep.core.pages import DEVICE, HOST, NO_SLOT, PageTable
from kvkeep.schema import NO_IDS, Ids, InvariantError, Residence


def keys(count: int, first: int = 0) -> list[bytes]:
    return [bytes([first + i]) * 32 for i in range(count)]


def path(length: int) -> Ids:
    """A path of any pages."""
    return np.zeros(length, np.intp)


@pytest.fixture
def table() -> PageTable:
    return PageTable(clocks=[0, 1], usual=4)


def test_ids_are_distinct_and_know_depth_parent_and_key(table: PageTable) -> None:
    ids = table.allocate(np.array([9, 8, 7]), 4, keys(4))
    assert sorted(ids.tolist()) == [0, 1, 2, 3]
    assert table.parent[ids].tolist() == [7, *ids[:-1].tolist()]
    assert table.depth[ids].tolist() == [3, 4, 5, 6]
    assert table.keys(ids) == keys(4)
    assert len(table) == 4


def test_no_pages_are_no_ids(table: PageTable) -> None:
    assert table.allocate(NO_IDS, 0, []).tolist() == []
    assert table.keys(table.allocate(NO_IDS, 0, [])) == []


def test_it_grows_and_keeps_what_it_knows(table: PageTable) -> None:
    first = table.allocate(NO_IDS, 3, keys(3))
    table.hold(first)
    table.used[1, first] = 7
    more = table.allocate(NO_IDS, 100, keys(100, 50))
    assert not set(first.tolist()) & set(more.tolist())
    assert table.keys(first) == keys(3)
    assert table.holds[first].tolist() == [1, 1, 1]
    assert table.used[1, first].tolist() == [7, 7, 7]
    assert (table.slot[:, :, more] == NO_SLOT).all()
    table.unhold(first)
    table.check()


def test_a_recycled_id_comes_back_fresh(table: PageTable) -> None:
    ids = table.allocate(path(5), 2, keys(2))
    table.used[:, ids] = table.tick()
    table.hits[..., ids] = table.dying[ids] = table.stored[0, ids] = 1
    table.recycle(ids)
    assert len(table) == 0
    again = table.allocate(NO_IDS, 4, keys(4))
    assert not table.used[:, again].any()
    assert not table.hits[..., again].any()
    assert not table.dying[again].any()
    assert not table.stored[:, again].any()


def test_what_is_held_or_has_slots_is_not_recycled(table: PageTable) -> None:
    ids = table.allocate(NO_IDS, 2, keys(2))
    table.hold(ids[:1])
    with pytest.raises(InvariantError, match="recycled"):
        table.recycle(ids)
    table.unhold(ids[:1])
    table.slot[HOST, 1, ids[1]] = 0
    with pytest.raises(InvariantError, match="recycled"):
        table.recycle(ids)


def test_holds_do_not_go_below_none(table: PageTable) -> None:
    ids = table.allocate(NO_IDS, 1, keys(1))
    with pytest.raises(InvariantError, match="below zero"):
        table.unhold(ids)


def test_the_clock_counts(table: PageTable) -> None:
    assert [table.tick(), table.tick()] == [1, 2]


def test_where_and_resident(table: PageTable) -> None:
    ids = table.allocate(NO_IDS, 3, keys(3))
    table.state[DEVICE, 0, ids[0]] = Residence.LIVE
    table.state[HOST, 0, ids[1]] = Residence.WRITING
    assert table.where(DEVICE, 0, ids, Residence.LIVE).tolist() == [True, False, False]
    assert table.where(HOST, 0, ids, Residence.WRITING).tolist() == [False, True, False]
    assert table.resident(0, ids).tolist() == [True, True, False]
    assert table.resident(1, ids).tolist() == [False, False, False]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t._free.give(t._free.take(1).repeat(2)), "free twice"),
        (lambda t: t.holds.__setitem__(t._free.ids[0], 1), "free page id"),
        (lambda t: t.slot.__setitem__((0, 0, 0), 3), "slot without a state"),
        (lambda t: t.holds.__setitem__(0, -1), "negative"),
        (lambda t: t.pins.__setitem__((0, 0, 0), 1), "not LIVE"),
    ],
    ids=["free twice", "free and held", "slot", "negative", "pinned"],
)
def test_check_sees_damage(table: PageTable, spoil, message: str) -> None:
    table.allocate(NO_IDS, 1, keys(1))
    table.check()
    spoil(table)
    with pytest.raises(InvariantError, match=message):
        table.check()


def test_columns_are_as_documented(table: PageTable) -> None:
    pages = 4
    assert table.key.shape == (pages, 32)
    assert table.slot.shape == table.state.shape == table.pins.shape == (2, 2, pages)
    assert table.used.shape == table.stored.shape == (2, pages)
    assert table.slot.dtype == np.int32
