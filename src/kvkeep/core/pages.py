"""The page table: where each page's state is, how many hold it, and when it was last needed.

NumPy arrays indexed by page id; one vectorised statement changes a path of pages. Ids within one
statement must be distinct: NumPy drops repeated indices in ``+=``. Scheduler's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, Ids, InvariantError, RequestError, Residence

DEVICE, HOST = 0, 1
TIERS = ("device", "host")


def constant(value: int, dtype: type) -> NDArray[Any]:
    """A NumPy scalar: comparing an array with it is twice as fast as with a Python int."""
    return np.array(value, dtype)


NO_SLOT, ZERO, ONE = (constant(value, np.int32) for value in (-1, 0, 1))
ABSENT, WRITING, LIVE = STATES = tuple(constant(state, np.uint8) for state in Residence)
MANY = 2  # hits that make a tail worth keeping: each turn of a conversation makes one

_T = TypeVar("_T", bound=np.generic)

States = NDArray[np.uint8]  # [groups, pages] of schema.Residence in one tier
count: Callable[[NDArray[Any]], int] = np.count_nonzero  # elements that are not zero
_HISTORY = ("dying", "used", "hits", "reused", "priority", "until", "stored")  # of an id's page


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a request's pages stay. One of several requests has the highest of their priorities
    for the longest of their times. Raises RequestError for a value out of range."""

    priority: int = 0  # 0 to 255; under eviction by priority, the lowest is evicted first
    ttl: float = np.inf  # seconds after the request's last use of a page; then its priority is 0
    keep: bool = True  # False: commits add nothing to the tree; the request leaves no trace

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 255:
            raise RequestError(f"priority must be from 0 to 255, not {self.priority}")
        if not self.ttl >= 0:
            raise RequestError(f"ttl must be at least 0 seconds, not {self.ttl}")


PLAIN = Retention()


class FreeList:
    """A stack of free page ids or slots: last in, first out."""

    def __init__(self, capacity: int, dtype: type = np.intp) -> None:
        self._stack: NDArray[Any] = np.empty(0, dtype=dtype)
        self._size = 0
        self.grow(capacity)

    def __len__(self) -> int:
        return self._size

    @property
    def ids(self) -> Ids:
        """All free numbers. A view."""
        return self._stack[: self._size]

    def grow(self, capacity: int) -> None:
        """Add the numbers from the old capacity up to the new one."""
        old = len(self._stack)
        self._stack = np.concatenate((self._stack, np.empty(capacity - old, self._stack.dtype)))
        self.give(np.arange(capacity - 1, old - 1, -1))

    def take(self, size: int) -> NDArray[Any]:
        """Remove ``size`` free numbers, sorted, so that neighbouring slots are copied together."""
        self._size -= size
        taken = self._stack[self._size : self._size + size].copy()
        taken.sort()
        return taken

    def give(self, ids: Ids) -> None:
        if self._size + len(ids) > len(self._stack):
            raise InvariantError("more is given back than there is")
        self._stack[self._size : self._size + len(ids)] = ids
        self._size += len(ids)

    def reset(self, ids: Ids) -> None:
        """Make these the only free numbers."""
        self._size = 0
        self.give(ids)


class PageTable:
    """Columns by page id.

    Args:
        clocks: ``Schema.clocks``.
        usual: a page count that is rarely exceeded.
    """

    def __init__(self, clocks: Sequence[int], usual: int) -> None:
        groups = len(clocks)
        # [pages]:
        self.depth = _column(np.int32)  # pages before this one in its prompt
        self.parent = _column(np.int32)  # the previous page; -1: the first of its prompt
        self.holds = _column(np.int32)  # leases, prefetches, line entries and tickets that use it
        self.dying = _column(np.bool_)  # out of the tree; the last unhold recycles the id
        self.reused = _column(np.int32)  # hits whose path included it
        self.priority = _column(np.uint8)  # highest of the requests that used it, 0 to 255, ...
        self.until = _column(np.float64)  # ... and when it ends, in monotonic seconds
        # [tiers, groups, pages]:
        self.slot = _column(np.int32, len(TIERS), groups)  # in a memory tier; NO_SLOT if none
        self.state = _column(np.uint8, len(TIERS), groups)  # :class:`~kvkeep.schema.Residence`
        self.pins = _column(np.int32, len(TIERS), groups)  # users of the slot, which is not evicted
        # [clocks, pages]: tick of the last admit or commit that needed it, by group clock
        self.used = _column(np.int64, max(clocks) + 1)
        # [groups, pages]:
        self.hits = _column(np.uint8, groups)  # that needed it, up to MANY; of groups with a tail
        self.kept = _column(np.int32, groups)  # prefetches that keep its slot on the host
        self.stored = _column(np.bool_, groups)  # hint: it was written to or read from storage

        self._columns = tuple(vars(self))  # their names
        self.key: NDArray[np.uint8] = np.zeros((0, 32), np.uint8)  # [pages, 32]: chained key
        self.clocks, self.groups, self.clock = tuple(clocks), groups, 0
        self._free = FreeList(0)
        self._usual = usual
        self._grow(min(usual, 1024))

    def __len__(self) -> int:
        """Pages in use."""
        return len(self.depth) - len(self._free)

    @property
    def rows(self) -> int:
        """All page ids, in use or not."""
        return len(self.depth)

    def _grow(self, capacity: int) -> None:
        old = len(self.depth)
        for name in self._columns:
            column = getattr(self, name)
            more = np.zeros((*column.shape[:-1], capacity - old), dtype=column.dtype)
            setattr(self, name, np.concatenate((column, more), axis=-1))
        self.slot[..., old:] = NO_SLOT
        self.key = np.concatenate((self.key, np.zeros((capacity - old, 32), dtype=np.uint8)))
        self._free.grow(capacity)

    def allocate(self, path: Ids, size: int, keys: list[bytes]) -> Ids:
        """Fresh ids for ``size`` consecutive pages after ``path``; ``keys``: one each, or none."""
        if size == 0:
            return NO_IDS
        if size > len(self._free):
            twice = 2 * self.rows
            usual = self._usual if self.rows < self._usual else twice
            self._grow(max(min(twice, usual), self.rows + size))
        ids = self._free.take(size)
        self.depth[ids] = np.arange(len(path), len(path) + size)
        self.parent[ids[1:]] = ids[:-1]
        self.parent[ids[0]] = path[-1] if len(path) else -1
        if keys:
            self.key[ids] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(size, 32)
        return ids

    def recycle(self, ids: Ids) -> None:
        """Free ids that have no slots and no holds and are not in the tree."""
        if count(self.holds[ids]) or count(self.slot.take(ids, axis=2) != NO_SLOT):
            raise InvariantError("a page id is recycled while it is held or has slots")
        for name in _HISTORY:
            for row in getattr(self, name).reshape(-1, self.rows):
                row[ids] = 0
        self._free.give(ids)

    def hold(self, ids: Ids) -> None:
        """Keep these ids from being recycled until :meth:`unhold`."""
        self.holds[ids] += ONE

    def unhold(self, ids: Ids) -> None:
        """Remove one hold of each; the caller then recycles dying pages without holds."""
        after = self.holds[ids] - ONE
        self.holds[ids] = after
        if count(after < ZERO):
            raise InvariantError("a page's hold count fell below zero")

    def recount(self, holds: NDArray[np.int32], pins: NDArray[np.int32]) -> None:
        """Overwrite holds and pins; the caller then recycles unheld ids outside the tree."""
        self.holds[:], self.pins[:] = holds, pins
        self._free.reset(NO_IDS)

    def tick(self) -> int:
        """Next clock value: a counter, so that equal requests give equal decisions."""
        self.clock += 1
        return self.clock

    def rank(self, path: Ids, retention: Retention) -> None:
        """Raise a whole path to at least this priority, for at least this long."""
        if retention.priority:
            self.priority[path] = np.maximum(self.priority[path], retention.priority)
            self.until[path] = np.maximum(self.until[path], time.monotonic() + retention.ttl)

    def keys(self, ids: Ids) -> list[bytes]:
        raw = self.key[ids].tobytes()
        return [raw[i : i + 32] for i in range(0, len(raw), 32)]

    def where(self, tier: int, group: int, ids: Ids, state: Residence) -> NDArray[np.bool_]:
        """Which of these pages are in ``state``."""
        found: NDArray[np.bool_] = self.state[tier, group][ids] == STATES[state]
        return found

    def idle(self, tier: int, group: int, ids: Ids | slice) -> NDArray[np.bool_]:
        """Which of these pages have a LIVE slot in a tier that is not pinned."""
        fit: NDArray[np.bool_] = self.state[tier, group][ids] == LIVE
        fit &= self.pins[tier, group][ids] == ZERO
        return fit

    def evictable(self, tier: int, group: int, ids: Ids | slice) -> NDArray[np.bool_]:
        """Which of these pages may lose their slot in a tier."""
        return self.idle(tier, group, ids) & ~self.dying[ids]

    def states(self, tier: int, ids: Ids) -> States:
        """The states of these pages in a tier. A copy."""
        states: States = self.state[tier].take(ids, axis=1)
        return states

    def resident(self, group: int, ids: Ids) -> NDArray[np.bool_]:
        """Which of these pages have a slot in either memory tier, LIVE or WRITING."""
        device, host = self.state[DEVICE, group], self.state[HOST, group]
        found: NDArray[np.bool_] = (device[ids] | host[ids]) != ABSENT
        return found

    def check(self) -> None:
        """Raise InvariantError unless all columns agree with each other."""
        free = np.bincount(self._free.ids, minlength=len(self.depth))
        if free.max() > 1:
            raise InvariantError("a page id is free twice")
        empty = self.slot == NO_SLOT
        if (free & (self.holds | ~empty.all(axis=(0, 1)))).any():
            raise InvariantError("a free page id has slots or holds")
        if (empty != (self.state == Residence.ABSENT)).any():
            raise InvariantError("a slot without a state, or a state without a slot")
        if self.pins.min() < 0 or self.holds.min() < 0:
            raise InvariantError("negative pins or holds")
        if ((self.pins != 0) & (self.state != Residence.LIVE)).any():
            raise InvariantError("a pinned slot is not LIVE")


def _column(dtype: type[_T], *lead: int) -> NDArray[_T]:
    """``[*lead, 0]``"""
    return np.empty((*lead, 0), dtype)
