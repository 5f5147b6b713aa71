"""The page table: what every page has where, who holds it, and when it was last needed.

A struct of NumPy arrays indexed by page id. What happens to a path of pages is one vectorised
statement; ids within one statement are distinct (NumPy drops repeated indices in ``+=``).
Only the scheduler's thread touches it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .schema import InvariantError, Residence

Ids = NDArray[np.int32]

DEVICE, HOST = 0, 1
TIERS = ("device", "host")
NO_SLOT = -1
MANY = 2  # hits that make a place worth keeping: one is how any conversation goes on

_COLUMNS: dict[str, tuple[type, int]] = {
    # name: (dtype, what a fresh row holds)
    "depth": (np.int32, 0),
    "holds": (np.int32, 0),
    "dying": (np.bool_, False),
    "slot": (np.int32, NO_SLOT),
    "state": (np.uint8, Residence.ABSENT),
    "pins": (np.int32, 0),
    "used": (np.int64, 0),
    "hits": (np.uint8, 0),
    "reused": (np.int32, 0),
    "priority": (np.uint8, 0),
    "stored": (np.bool_, False),
}


class PageTable:
    """Columns by page id.

    ========= ================= ==================================================================
    column    shape             meaning
    ========= ================= ==================================================================
    depth     [pages]           pages before this one in its prompt
    key       [pages, 32] uint8 chained key
    holds     [pages]           leases, prefetches and tickets that know this id
    dying     [pages]           gone from the tree; id and slots are recycled with the last hold
    slot      [tiers, groups, pages]  slot in a memory tier, NO_SLOT if none
    state     [tiers, groups, pages]  :class:`~kvkeep.schema.Residence`
    pins      [tiers, groups, pages]  users of the slot; it stays while there are any
    used      [groups, pages]   clock of the last admit or commit that needed it
    hits      [groups, pages]   hits that needed it, up to ``MANY``; of groups with a tail
    reused    [pages]           hits whose path it was on
    priority  [pages]           highest priority of the requests whose path it was on, 0 to 255
    stored    [groups, pages]   hint: it was written to, or read from, storage
    ========= ================= ==================================================================
    """

    depth: Ids
    holds: Ids
    dying: NDArray[np.bool_]
    slot: Ids
    state: NDArray[np.uint8]
    pins: Ids
    used: NDArray[np.int64]
    hits: NDArray[np.uint8]
    reused: Ids
    priority: NDArray[np.uint8]
    stored: NDArray[np.bool_]

    def __init__(self, groups: int, capacity: int = 1024) -> None:
        self.groups = groups
        self.clock = 0
        self.key: NDArray[np.uint8] = np.zeros((0, 32), dtype=np.uint8)
        lead: dict[str, tuple[int, ...]] = {
            "slot": (2, groups),
            "state": (2, groups),
            "pins": (2, groups),
        }
        lead |= {"used": (groups,), "hits": (groups,), "stored": (groups,)}
        for name, (dtype, _) in _COLUMNS.items():
            setattr(self, name, np.empty((*lead.get(name, ()), 0), dtype=dtype))
        self._free: list[int] = []
        self._grow(capacity)

    def __len__(self) -> int:
        """Pages in use."""
        return len(self.depth) - len(self._free)

    def _grow(self, capacity: int) -> None:
        old = len(self.depth)
        for name, (_, fresh) in _COLUMNS.items():
            column = getattr(self, name)
            more = np.full((*column.shape[:-1], capacity - old), fresh, dtype=column.dtype)
            setattr(self, name, np.concatenate((column, more), axis=-1))
        self.key = np.concatenate((self.key, np.zeros((capacity - old, 32), dtype=np.uint8)))
        self._free.extend(range(capacity - 1, old - 1, -1))

    def allocate(self, first: int, keys: list[bytes]) -> Ids:
        """Fresh ids for consecutive pages of one prompt.

        Args:
            first: depth of the first page.
            keys: chained keys, one a page.
        """
        count = len(keys)
        if count == 0:
            return np.empty(0, dtype=np.int32)
        if count > len(self._free):
            self._grow(max(2 * len(self.depth), len(self.depth) + count))
        ids = np.array(self._free[-count:][::-1], dtype=np.int32)
        del self._free[-count:]
        self.depth[ids] = np.arange(first, first + count)
        self.key[ids] = np.frombuffer(b"".join(keys), dtype=np.uint8).reshape(count, 32)
        return ids

    def recycle(self, ids: Ids) -> None:
        """Give ids back. They have no slots, no holds, and are in no tree."""
        if self.holds[ids].any() or (self.slot[:, :, ids] != NO_SLOT).any():
            raise InvariantError("a page id is recycled while it is held or has slots")
        for name, (_, fresh) in _COLUMNS.items():
            getattr(self, name)[..., ids] = fresh
        self._free.extend(ids.tolist())

    def hold(self, ids: Ids) -> None:
        """Keep these ids from being recycled."""
        self.holds[ids] += 1

    def unhold(self, ids: Ids) -> None:
        """Take back one hold of each. The caller reaps what is dying and no longer held."""
        self.holds[ids] -= 1
        if (self.holds[ids] < 0).any():
            raise InvariantError("a page is held less than never")

    def tick(self) -> int:
        """Next clock value. A counter, so that the same requests give the same decisions."""
        self.clock += 1
        return self.clock

    def rank(self, path: Ids, priority: int) -> None:
        """A whole path is at least as important as this."""
        self.priority[path] = np.maximum(self.priority[path], priority)

    def keys(self, ids: Ids) -> list[bytes]:
        """Chained keys of these pages."""
        raw = self.key[ids].tobytes()
        return [raw[i : i + 32] for i in range(0, len(raw), 32)]

    def where(self, tier: int, group: int, ids: Ids, state: Residence) -> NDArray[np.bool_]:
        """Which of these pages are in ``state``."""
        found: NDArray[np.bool_] = self.state[tier, group, ids] == state
        return found

    def resident(self, group: int, ids: Ids) -> NDArray[np.bool_]:
        """Which of these pages have a slot, or one being filled, in either memory tier."""
        found: NDArray[np.bool_] = (self.state[:, group, ids] != Residence.ABSENT).any(axis=0)
        return found

    def check(self) -> None:
        """Raise InvariantError unless all columns agree with each other."""
        free = np.bincount(np.array(self._free, dtype=np.int64), minlength=len(self.depth))
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
            raise InvariantError("a page is pinned where its bytes are not there")
