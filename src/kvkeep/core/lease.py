"""Leases and prefetches: what the cache gives to its caller.

Only the cache changes them. Scheduler's thread only.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..media.arrival import Arrival
from ..schema import NO_IDS, NO_SLOTS, Ids, Key, Slots
from .pages import NO_SLOT, PLAIN, Retention
from .presence import Mask, Presence
from .ticket import Ticket

_serial = itertools.count()


@dataclass(slots=True)
class Explanation:
    """Where a request's prefix hit came from, and what limited it."""

    tokens: dict[str, int] = field(default_factory=dict)  # by tier: "device", "host", "storage"
    limited_by: str | None = None  # the group whose absence ended the hit, or None
    skipped: int = 0  # tokens on the host that were faster to recompute
    loaded_bytes: int = 0  # host to device
    load_ms: float = 0.0  # from admit until the last page landed


@dataclass(slots=True, eq=False)
class Lease:
    """A request's device slots. Read ``slots`` again after each call: commit may change them.

    ::

        page    0        valid_from       len(path)      capacity
                |  absent  |   committed   |   private    |
        slot       -1        of the page's   the lease's
                             row, or -1      own
    """

    groups: tuple[str, ...]  # names, in the schema's order; "by group" below follows it
    root: bytes  # schema.root_key of its namespace
    path: Ids  # page ids of the committed pages, in order; each is held
    retention: Retention = PLAIN
    table: NDArray[np.int32] = field(init=False)  # [groups, capacity in pages]: device slot or -1
    owned: Mask = field(init=False)  # [groups, capacity]: private slot; else pinned by its row
    first_valid: list[int] = field(init=False)  # by group: pages before it hold no valid state
    whole: list[bool] = field(init=False)  # by group: False: gaps, so later pages stay private
    running: list[Slots] = field(init=False)  # by group: slots of recurrent state
    # of each page of the hit, the lowest tier it came from: 0 device, 1 host, 2 storage
    origin: NDArray[np.intp] = field(default_factory=lambda: NO_IDS)
    cuts: list[int] = field(default_factory=list)  # token positions, sorted: see next_cut
    lasting: frozenset[int] = frozenset()  # cuts at which hits are expected to end
    arriving: list[Arrival] = field(default_factory=list)  # loads in flight
    # by group: pages of the hit that are being loaded, and into which slots
    coming: dict[int, tuple[NDArray[np.intp], Slots]] = field(default_factory=dict)
    explanation: Explanation = field(default_factory=Explanation)
    detached: bool = False  # new pages stay private: its path left the tree, or it keeps nothing
    released: bool = False  # by the caller, or after broken bookkeeping: admit again
    serial: int = field(default_factory=_serial.__next__)

    def __post_init__(self) -> None:
        count = len(self.groups)
        self.table, self.owned = _blank(count, len(self.path))
        self.first_valid, self.whole = [0] * count, [True] * count
        self.running = [NO_SLOTS] * count

    @property
    def ready(self) -> bool:
        """All loads have landed or failed; ``pages`` is final."""
        return not self.arriving

    @property
    def lost(self) -> bool:
        """A load has failed: no step may run before ``ready``, when the hit is shorter."""
        return any(one.failed for one in self.arriving)

    @property
    def pages(self) -> int:
        """Committed pages, the hit included."""
        return len(self.path)

    @property
    def capacity(self) -> int:
        """Pages that the table covers."""
        return int(self.table.shape[1])

    def slots(self, group: str) -> Slots:
        """Block table: ``[capacity in pages]`` int32 device slots of ``group``; -1: none. Until the
        lease is ``ready``, wait for ``arriving`` before reading them."""
        g = self.groups.index(group)
        slots: Slots = self.table[g]
        if g in self.coming:
            pages, targets = self.coming[g]
            slots = slots.copy()
            slots[pages] = targets
        return slots

    def working(self, group: str) -> Slots:
        """``[Group.working]`` int32 device slots for the request's recurrent state."""
        return self.running[self.groups.index(group)]

    def valid_from(self, group: str) -> int:
        """First page of ``group`` with valid state; above 0 only under ``lenient``."""
        return self.first_valid[self.groups.index(group)]

    def next_cut(self, position: int) -> int | None:
        """The first token position after ``position`` where chunks and re-runs must end for a
        snapshot of recurrent state; None: no more."""
        return next((cut for cut in self.cuts if cut > position), None)

    def widen(self, pages: int) -> None:
        """Make the block table so many pages wider, without slots."""
        if pages:
            table, owned = _blank(len(self.groups), pages)
            self.table = np.concatenate((self.table, table), axis=1)
            self.owned = np.concatenate((self.owned, owned), axis=1)

    def shared(self, g: int) -> NDArray[np.intp]:
        """Pages of a group whose slot is pinned through their row."""
        return np.flatnonzero((self.table[g] != NO_SLOT) & ~self.owned[g])

    def end(self) -> None:
        """Forget all pages and slots; the caller has given them back."""
        self.released, self.path = True, NO_IDS
        self.table, self.owned = self.table[:, :0], self.owned[:, :0]
        self.running = [NO_SLOTS] * len(self.groups)
        self.coming.clear()
        self.arriving.clear()


def _blank(groups: int, pages: int) -> tuple[NDArray[np.int32], Mask]:
    """``[groups, pages]`` of a block table without slots, and which of them are private."""
    table = np.empty((groups, pages), dtype=np.int32)
    table.fill(NO_SLOT)
    return table, np.zeros((groups, pages), dtype=bool)


class Phase(enum.IntEnum):
    """How far a prefetch has come; it never decreases."""

    ASKING = 0  # a lookup is in flight
    WAITING = 1  # in line for host memory
    READING = 2  # reads are in flight
    DONE = 3  # the request waits for nothing more
    CLOSED = 4  # the request was admitted or is gone


@dataclass(slots=True, eq=False)
class Prefetch:
    """Storage to host, for a request that is not scheduled yet."""

    root: bytes  # schema.root_key of its namespace
    raw: bytes  # token bytes of the prompt's whole pages that a hit may use
    found: Presence  # in memory or storage, of those pages
    phase: Phase = Phase.ASKING
    keys: list[bytes] = field(default_factory=list)  # chained keys of those pages
    names: list[list[Key]] = field(default_factory=list)  # by group: their storage keys
    reach: int = 0  # usable pages in memory and storage together
    gain: int = 0  # tokens that the prefetch saves computing
    path: Ids = field(default_factory=lambda: NO_IDS)  # each held once
    pinned: list[tuple[int, Ids]] = field(default_factory=list)  # host pins: (group, pages)
    fetched: Ids = field(default_factory=lambda: NO_IDS)  # pages read from storage
    reads: list[Ticket] = field(default_factory=list)  # in flight, in lane order
    begun: float = field(default_factory=time.monotonic)  # monotonic seconds
    serial: int = field(default_factory=_serial.__next__)

    @property
    def waits(self) -> bool:
        """The request may still gain pages."""
        return self.phase < Phase.DONE

    def forsake(self, tickets: Collection[Ticket]) -> None:
        """Stop waiting for reads that are not among ``tickets``."""
        self.reads = [read for read in self.reads if read in tickets]
        if self.phase is Phase.READING and not self.reads:
            self.phase = Phase.DONE
