"""The slots of one memory tier: reserve, adopt, publish, pin, drop, and who goes first.

One class, an instance for the device and one for the host. A slot is free, private to a caller
that reserved it, or of a page's row. Rows live in the page table; this is the only code that
changes their slot, state and pins. Only the scheduler's thread touches it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .pages import NO_SLOT, TIERS, PageTable
from .policy import Order
from .schema import InvariantError, Residence

Ids = NDArray[np.int32]

_FREE, _PRIVATE = -1, -2  # owners of a slot that are not a page id
_SELECT = 0.02  # share of a tier that one look for victims puts in order


class Tier:
    """Slots of every group in one memory tier.

    Args:
        table: the page table whose rows this tier's slots belong to.
        index: ``DEVICE`` or ``HOST``.
        capacity: slots of each group.
        order: who is evicted first.
    """

    def __init__(self, table: PageTable, index: int, capacity: Sequence[int], order: Order) -> None:
        self.table = table
        self.index = index
        self.capacity = tuple(capacity)
        self.evicted = [0] * len(capacity)  # pages, by group; only ever grows
        self._owner = [np.full(n, _FREE, dtype=np.int32) for n in capacity]
        self._free = [list(range(n - 1, -1, -1)) for n in capacity]
        self._queues = [_Queue(self, group, order) for group in range(len(capacity))]

    @property
    def name(self) -> str:
        """ "device" or "host"."""
        return TIERS[self.index]

    def free_slots(self, group: int) -> int:
        """Slots that nobody has."""
        return len(self._free[group])

    def reserve(self, group: int, count: int) -> Ids | None:
        """``count`` private slots, or None if fewer are free. Evicts nothing."""
        free = self._free[group]
        if count > len(free):
            return None
        slots = np.array(free[len(free) - count :][::-1], dtype=np.int32)
        del free[len(free) - count :]
        self._owner[group][slots] = _PRIVATE
        return slots

    def free(self, group: int, slots: Ids) -> None:
        """Give private slots back."""
        if (self._owner[group][slots] != _PRIVATE).any():
            raise InvariantError("a slot is freed that is not private")
        self._owner[group][slots] = _FREE
        self._free[group].extend(slots.tolist())

    def adopt(self, group: int, pages: Ids, slots: Ids, state: Residence) -> None:
        """Rows without a slot take over private ones."""
        table = self.table
        if (self._owner[group][slots] != _PRIVATE).any():
            raise InvariantError("a row adopts a slot that is not private")
        if (table.slot[self.index, group, pages] != NO_SLOT).any():
            raise InvariantError("a row adopts a second slot")
        table.slot[self.index, group, pages] = slots
        table.state[self.index, group, pages] = state
        self._owner[group][slots] = pages
        if state == Residence.LIVE:
            self._queues[group].offer(pages)

    def publish(self, group: int, pages: Ids) -> None:
        """The bytes of rows that were WRITING are there. Stamps nothing."""
        self._expect(group, pages, Residence.WRITING)
        self.table.state[self.index, group, pages] = Residence.LIVE
        self._queues[group].offer(pages)

    def drop(self, group: int, pages: Ids) -> None:
        """Rows lose their slots, which become free. None of them is pinned."""
        table = self.table
        if table.pins[self.index, group, pages].any():
            raise InvariantError("a pinned slot is dropped")
        slots = table.slot[self.index, group, pages]
        if (slots == NO_SLOT).any():
            raise InvariantError("a row without a slot is dropped")
        table.slot[self.index, group, pages] = NO_SLOT
        table.state[self.index, group, pages] = Residence.ABSENT
        self._owner[group][slots] = _FREE
        self._free[group].extend(slots.tolist())

    def pin(self, group: int, pages: Ids) -> Ids:
        """Keep LIVE rows where they are; returns their slots."""
        self._expect(group, pages, Residence.LIVE)
        self.table.pins[self.index, group, pages] += 1
        slots: Ids = self.table.slot[self.index, group, pages]
        return slots

    def unpin(self, group: int, pages: Ids) -> None:
        """Take back one pin of each."""
        self.table.pins[self.index, group, pages] -= 1
        if (self.table.pins[self.index, group, pages] < 0).any():
            raise InvariantError("a slot is pinned less than never")
        self._queues[group].offer(pages)

    def offer(self, group: int, pages: Ids) -> None:
        """The order of these pages has changed to earlier."""
        self._queues[group].offer(pages)

    def evictable(self, group: int, pages: Ids) -> NDArray[np.bool_]:
        """Which of these pages may lose their slot here."""
        table = self.table
        fit: NDArray[np.bool_] = table.state[self.index, group, pages] == Residence.LIVE
        fit &= table.pins[self.index, group, pages] == 0
        fit &= ~table.dying[pages]
        return fit

    def evict(self, group: int, count: int) -> Ids:
        """Drop up to ``count`` pages, the first in order first; returns them."""
        gone: list[Ids] = []
        while count > 0 and len(pages := self.victims(group, count)):
            self.drop(group, pages)
            gone.append(pages)
            count -= len(pages)
        pages = np.concatenate(gone) if gone else np.empty(0, dtype=np.int32)
        self.evicted[group] += len(pages)
        return pages

    def victims(self, group: int, count: int) -> Ids:
        """At most ``count`` pages that go first, in order; none if none may go.

        The caller drops or pins all of them before it asks again."""
        return self._queues[group].take(count)

    def resident(self, group: int) -> Ids:
        """Every page with a slot here."""
        owner = self._owner[group]
        return owner[owner >= 0]

    def _expect(self, group: int, pages: Ids, state: Residence) -> None:
        if (self.table.state[self.index, group, pages] != state).any():
            raise InvariantError(f"a {self.name} row is not {state.name} where it must be")

    def check(self) -> None:
        """Raise InvariantError unless slots, rows and the free list agree."""
        for group, owner in enumerate(self._owner):
            free = np.array(self._free[group], dtype=np.int64)
            if (np.bincount(free, minlength=len(owner)) > (owner == _FREE)).any():
                raise InvariantError(f"{self.name}: the free list is wrong")
            if np.count_nonzero(owner == _FREE) != len(free):
                raise InvariantError(f"{self.name}: a slot leaked")
            slots = np.flatnonzero(owner >= 0)
            row = self.table.slot[self.index, group]
            if (row[owner[slots]] != slots).any() or np.count_nonzero(row >= 0) != len(slots):
                raise InvariantError(f"{self.name}: rows and slots disagree")

    def private(self, group: int) -> int:
        """Slots that callers have reserved and no row has."""
        return int(np.count_nonzero(self._owner[group] == _PRIVATE))


class _Queue:
    """Evictable pages of one group, in order, found a batch at a time.

    One look at all resident pages puts the first 2% in order; they are taken from the front, each
    checked again. Pages that become evictable later with a key inside the batch are merged in, so
    the order is exact at every moment.
    """

    def __init__(self, tier: Tier, group: int, order: Order) -> None:
        self._tier, self._group, self._order = tier, group, order
        self._pages = np.empty(0, dtype=np.int32)
        self._keys = np.empty(0, dtype=np.int64)
        self._horizon: int | None = None  # all evictable pages up to this key are in the batch

    def offer(self, pages: Ids) -> None:
        """These may have become evictable."""
        if self._horizon is None:
            return
        keys = self._order(self._tier.table, self._group, pages)
        late = keys <= self._horizon
        if late.any():
            self._set(
                np.concatenate((self._pages, pages[late])),
                np.concatenate((self._keys, keys[late])),
            )

    def take(self, count: int) -> Ids:
        """As :meth:`Tier.victims`."""
        while True:
            if not len(self._pages) and not self._refill(count):
                return self._pages
            pages, keys = self._pages[:count], self._keys[:count]
            self._pages, self._keys = self._pages[count:], self._keys[count:]
            if not len(self._pages):
                self._horizon = None
            good = self._tier.evictable(self._group, pages)
            good &= self._order(self._tier.table, self._group, pages) == keys
            same = (pages[1:] == pages[:-1]) & (keys[1:] == keys[:-1])
            good[1:] &= ~same  # offered twice; side by side with another key, the older is stale
            if good.any():
                return pages[good]

    def _refill(self, count: int) -> bool:
        pages = self._tier.resident(self._group)
        pages = pages[self._tier.evictable(self._group, pages)]
        keys = self._order(self._tier.table, self._group, pages)
        size = max(count, int(_SELECT * self._tier.capacity[self._group]))
        if size < len(pages):
            first = np.argpartition(keys, size)[:size]
            pages, keys = pages[first], keys[first]
        self._set(pages, keys)
        self._horizon = int(self._keys[-1]) if len(keys) else None
        return len(keys) > 0

    def _set(self, pages: Ids, keys: NDArray[np.int64]) -> None:
        order = np.lexsort((pages, keys))
        self._pages, self._keys = pages[order], keys[order]
