"""The slots of one memory tier: reserve, adopt, publish, pin, drop, evict.

A slot is free, private to the caller that reserved it, or owned by a row, which is one group's part
of a page. Rows live in the page table; only this file changes their slot, state and pins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, Ids, InvariantError, Residence, Slots
from .pages import (
    ABSENT,
    LIVE,
    NO_SLOT,
    ONE,
    STATES,
    TIERS,
    WRITING,
    ZERO,
    FreeList,
    PageTable,
    constant,
    count,
)
from .policy import Order
from .victims import Queue

_FREE, _PRIVATE, _NOBODY = (constant(owner, np.intp) for owner in (-1, -2, -3))  # not page ids

Groups = int | tuple[int, ...]
"""The rows of one group, by index, or of several, changed by one NumPy call. Arrays of slots are
``[pages]`` for an index and ``[groups, pages]`` for a tuple."""


class Tier:
    """Slots of every group in one memory tier, ``DEVICE`` or ``HOST``. Scheduler's thread only."""

    def __init__(self, table: PageTable, index: int, capacity: Sequence[int], order: Order) -> None:
        self.table = table
        self.index, self.name = index, TIERS[index]
        self.capacity = tuple(capacity)
        self.evicted = [0] * len(capacity)  # pages, by group; never decreases
        self._order = order
        # by slot, group after group: its page, _FREE or _PRIVATE; _NOBODY at index NO_SLOT
        self._owners = np.concatenate([np.append(np.full(n, _FREE), _NOBODY) for n in capacity])
        self._starts = np.cumsum([0, *(n + 1 for n in capacity)])[:-1]
        self._owner = np.split(self._owners, self._starts[1:])  # by group; views
        self._free = [FreeList(n, np.int32) for n in capacity]
        self._busy = [0] * len(capacity)  # slots that are private, being filled, or pinned
        self._queues = [self._queue(group) for group in range(len(capacity))]
        self._columns: dict[Groups, _Columns] = {}
        self._every = tuple(range(len(capacity)))  # groups

    def free_slots(self, group: int) -> int:
        return len(self._free[group])

    def available(self, group: int) -> int:
        """Slots that are free or that evicting everything idle would free."""
        return self.capacity[group] - self._busy[group]

    def reserve(self, groups: Groups, wanted: int) -> Slots | None:
        """``wanted`` private slots per group, or None if a group has fewer free. Evicts nothing."""
        of = self._of(groups)
        for group in of.groups:
            if wanted > len(self._free[group]):
                return None
        taken: list[Slots] = []
        for group in of.groups:
            taken.append(self._free[group].take(wanted))
            self._busy[group] += wanted
        slots = of.joined(taken)
        if wanted:
            places = of.places(slots)
            if count(of.owner[places] != _FREE) or count(slots[..., 1:] == slots[..., :-1]):
                raise InvariantError(f"a reserved {self.name} slot is not free")
            of.owner[places] = _PRIVATE
        return slots

    def free(self, groups: Groups, slots: Slots) -> None:
        """Give private slots back."""
        if not slots.size:
            return
        of = self._of(groups)
        of.owner[self._private(of, slots)] = _FREE
        for group, mine in of.each(slots):
            self._free[group].give(mine)
            self._busy[group] -= len(mine)

    def adopt(self, groups: Groups, pages: Ids, slots: Slots, state: Residence) -> None:
        """Give private slots to rows that have none."""
        of = self._of(groups)
        rows, places = of.rows(pages), self._private(of, slots)
        if count(of.state[rows]):
            raise InvariantError("a row adopts a second slot")
        of.slot[rows] = slots
        of.state[rows] = STATES[state]
        of.owner[places] = pages
        if state == Residence.LIVE:
            self._live(of, pages)

    def publish(self, groups: Groups, pages: Ids) -> None:
        """Mark WRITING rows as LIVE; clocks do not change."""
        of = self._of(groups)
        rows = of.rows(pages)
        self._expect(of, rows, Residence.WRITING)
        of.state[rows] = LIVE
        self._live(of, pages)

    def drop(self, groups: Groups, pages: Ids) -> None:
        """Free the slots of unpinned rows."""
        if not len(pages):
            return
        of = self._of(groups)
        rows = of.rows(pages)
        if count(of.pins[rows]):
            raise InvariantError("a pinned slot is dropped")
        slots = of.slot[rows]
        of.owner[self._own(of, pages, slots)] = _FREE
        for group, writing in of.each(of.state[rows] == WRITING):
            self._busy[group] -= count(writing)
        of.slot[rows] = NO_SLOT
        of.state[rows] = ABSENT
        for group, mine in of.each(slots):
            self._free[group].give(mine)

    def purge(self, pages: Ids, over: NDArray[np.bool_]) -> None:
        """Drop these pages' slots in all groups, except pinned or WRITING ones of held pages.

        ``over``: ``[pages]``: the page has no holds."""
        rows = self.table.state[self.index].take(pages, axis=1) != ABSENT
        if not count(rows):
            return
        if count(over) < len(over):
            for group, row in enumerate(rows):
                row &= over | self.table.idle(self.index, group, pages)
        if count(rows) == rows.size:
            self.drop(self._every, pages)
            return
        for group, row in enumerate(rows):
            self.drop(group, pages[row])

    def pin(self, groups: Groups, pages: Ids) -> Slots:
        """Keep LIVE rows from eviction; returns their slots."""
        of = self._of(groups)
        rows = of.rows(pages)
        slots: Slots = of.slot[rows]
        if len(pages):
            self._expect(of, rows, Residence.LIVE)
            self._own(of, pages, slots)
            before = of.pins[rows]
            of.pins[rows] = before + ONE
            for group, pinned in of.each(before):
                self._busy[group] += len(pages) - count(pinned)
        return slots

    def unpin(self, groups: Groups, pages: Ids) -> None:
        """Remove one pin of each."""
        if not len(pages):
            return
        of = self._of(groups)
        rows = of.rows(pages)
        after = of.pins[rows] - ONE
        if count(after < ZERO):
            raise InvariantError("a slot's pin count fell below zero")
        of.pins[rows] = after
        for group, pinned in of.each(after):
            self._busy[group] -= len(pages) - count(pinned)
            self._queues[group].offer(pages)

    def offer(self, group: int, pages: Ids) -> None:
        """Note that the order moved these pages forward."""
        self._queues[group].offer(pages)

    def evictable(self, group: int, pages: Ids | slice) -> NDArray[np.bool_]:
        """Which of these pages are LIVE here, not pinned and not dying."""
        return self.table.evictable(self.index, group, pages)

    def evict(self, group: int, most: int) -> Ids:
        """Drop up to ``most`` pages in eviction order; returns them."""
        gone: list[Ids] = []
        while most > 0 and len(pages := self.victims(group, most)):
            self.drop(group, pages)
            gone.append(pages)
            most -= len(pages)
        pages = np.concatenate(gone) if gone else NO_IDS
        self.evicted[group] += len(pages)
        return pages

    def victims(self, group: int, most: int) -> Ids:
        """The first evictable pages, up to ``most``, in eviction order.

        The caller must drop or pin all of them before it asks again."""
        if self.available(group) == self.free_slots(group):
            return NO_IDS  # nothing is idle
        return self._queues[group].take(most)

    def _queue(self, group: int) -> Queue:
        key = partial(self._order, self.table, group)
        return Queue(
            self.table, self.capacity[group], key, partial(self.table.evictable, self.index, group)
        )

    def _of(self, groups: Groups) -> _Columns:
        """The columns of these groups, renewed when the table grows."""
        of = self._columns.get(groups)
        if of is None or of.source is not self.table.slot:
            of = self._columns[groups] = _Columns(self, groups)
        return of

    def _private(self, of: _Columns, slots: Slots) -> Ids:
        """Indices of these slots in ``of.owner``; all must be private."""
        places = of.places(slots)
        if count(of.owner[places] != _PRIVATE):
            raise InvariantError(f"a {self.name} slot is not private to its caller")
        return places

    def _own(self, of: _Columns, pages: Ids, slots: Slots) -> Ids:
        """Indices of these rows' slots in ``of.owner``; each row must own its slot."""
        places = of.places(slots)
        if count(of.owner[places] != pages):
            raise InvariantError(f"a {self.name} row does not own its slot")
        return places

    def _live(self, of: _Columns, pages: Ids) -> None:
        """Note that these rows became LIVE."""
        for group in of.groups:
            self._busy[group] -= len(pages)
            self._queues[group].offer(pages)

    def _expect(self, of: _Columns, rows: Ids, state: Residence) -> None:
        if count(of.state[rows] != STATES[state]):
            raise InvariantError(f"a {self.name} row is not {state.name}")

    def sift(self, filling: Sequence[Slots]) -> Ids:
        """Clear all rows that disagree with their slots' owners, or with the slots that tickets are
        ``filling``, by group; returns their pages."""
        lost = []
        for group, owner in enumerate(self._owner):
            row, state = self.table.slot[self.index, group], self.table.state[self.index, group]
            proper = np.full(len(owner), LIVE)
            proper[filling[group]] = WRITING
            at = np.flatnonzero(owner >= 0)
            pages = owner[at]
            sound = (row[pages] == at) & (state[pages] == proper[at])
            bad = (row != NO_SLOT) | (state != ABSENT)
            bad[pages] = True
            bad[pages[sound]] = False
            row[bad], state[bad] = NO_SLOT, ABSENT
            lost.append(np.flatnonzero(bad))
        return np.concatenate(lost)

    def recount(self, private: Sequence[Slots]) -> None:
        """Rebuild owners, free lists and counts from rows, pins and ``private`` slots by group."""
        for group, owner in enumerate(self._owner):
            row = self.table.slot[self.index, group]
            pages = np.flatnonzero(row != NO_SLOT)
            owner[:-1] = _FREE
            owner[private[group]] = _PRIVATE
            owner[row[pages]] = pages
            self._free[group].reset(np.flatnonzero(owner == _FREE)[::-1])
            self._busy[group] = self._count_busy(group)
            self._queues[group] = self._queue(group)

    def _count_busy(self, group: int) -> int:
        state = self.table.state[self.index, group]
        writing = count(state == WRITING)
        pinned = count(self.table.pins[self.index, group])
        return self.private(group) + writing + pinned

    def check(self) -> None:
        """Raise InvariantError unless slots, rows and the free list agree."""
        for group, owner in enumerate(self._owner):
            free = self._free[group].ids
            if (np.bincount(free, minlength=len(owner)) > (owner == _FREE)).any():
                raise InvariantError(f"{self.name}: the free list is wrong")
            if count(owner == _FREE) != len(free):
                raise InvariantError(f"{self.name}: a slot leaked")
            slots = np.flatnonzero(owner >= 0)
            row = self.table.slot[self.index, group]
            if (row[owner[slots]] != slots).any() or count(row >= 0) != len(slots):
                raise InvariantError(f"{self.name}: rows and slots disagree")
            if self._busy[group] != self._count_busy(group):
                raise InvariantError(f"{self.name}: slots in use are counted wrongly")

    def private(self, group: int) -> int:
        """How many slots callers have reserved and no row has adopted."""
        return count(self._owner[group] == _PRIVATE)


class _Columns:
    """Views of one group's rows and slot owners in a tier, or of all groups' as flat arrays, in
    which a group begins at ``_row`` and ``_place``."""

    def __init__(self, tier: Tier, groups: Groups) -> None:
        table = tier.table
        self.source = table.slot  # replaced when the table grows
        self.groups: list[int] = np.ravel(groups).tolist()
        self._lift = None if np.ndim(groups) else ...  # index that shapes [pages] as slots
        self._row, self._place, self.owner = None, None, tier._owner[self.groups[0]]
        columns = [column[tier.index] for column in (table.slot, table.state, table.pins)]
        if len(self.groups) == 1:
            columns = [column[self.groups[0]] for column in columns]
        else:
            index = np.array(groups)[:, None]
            self._row, self._place, self.owner = (
                index * table.rows,
                tier._starts[index],
                tier._owners,
            )
        self.slot, self.state, self.pins = (column.reshape(-1) for column in columns)

    def rows(self, pages: Ids) -> Ids:
        """Indices of these pages in the columns."""
        return pages[self._lift] if self._row is None else pages + self._row

    def places(self, slots: Slots) -> Ids:
        """Indices of these slots in ``owner``."""
        places = slots.astype(np.intp)
        if self._place is not None:
            places += self._place
        return places

    def joined(self, slots: list[Slots]) -> Slots:
        """One array of every group's slots."""
        return slots[0][self._lift] if self._row is None else np.array(slots)

    def each(self, values: NDArray[Any]) -> Iterable[tuple[int, NDArray[Any]]]:
        """Every group with its row of an array shaped like ``slots``."""
        if self._row is None:
            return ((self.groups[0], values.reshape(-1)),)
        return zip(self.groups, values, strict=True)
