"""What a caller of the cache holds: a lease on pages, and a prefetch.

Only the cache changes them; everybody reads them on the scheduler's thread.
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
from ..schema import NO_IDS, NO_SLOTS, Ids, Key, RequestError, Slots
from .pages import NO_SLOT
from .presence import Mask, Presence
from .ticket import Ticket

_serial = itertools.count()


@dataclass(slots=True)
class Explanation:
    """Where a request's prefix came from, and what kept it from being longer."""

    tokens: dict[str, int] = field(default_factory=dict)  # by tier: "device", "host", "storage"
    limited_by: str | None = None  # the group whose absence ended the hit; None: nothing did
    skipped: int = 0  # tokens that were on the host, and faster to compute than to load
    loaded_bytes: int = 0  # host to device
    load_ms: float = 0.0  # from admit until the last page had landed


@dataclass(slots=True, eq=False)
class Lease:
    """A request's hold on device slots. Read ``slots`` after each call: commit may repoint.

    ::

        page    0        valid_from       len(path)      capacity
                |  absent  |   committed   |   private    |
        slot       -1        of the page's   the lease's
                             row, or -1      own
    """

    groups: tuple[str, ...]  # names; everything below that is "by group" goes by their order
    root: bytes  # of its namespace: schema.root_key
    path: Ids  # page ids of the committed pages, in order; each is held
    priority: int = 0  # of its pages, where eviction is by priority
    table: NDArray[np.int32] = field(init=False)  # [groups, capacity in pages]: device slots or -1
    owned: Mask = field(init=False)  # [groups, capacity]: the lease's own; else pinned by the row
    first_valid: list[int] = field(init=False)  # by group: earlier pages hold nothing to be read
    whole: list[bool] = field(init=False)  # by group: no gaps; else what follows stays private
    running: list[Slots] = field(init=False)  # by group: slots of running state
    # of each page of the hit, the lowest tier it came from: 0 device, 1 host, 2 storage
    origin: NDArray[np.intp] = field(default_factory=lambda: NO_IDS)
    cuts: list[int] = field(default_factory=list)  # token positions, sorted: see next_cut
    lasting: frozenset[int] = frozenset()  # those of them that hits are expected to end at
    arriving: list[Arrival] = field(default_factory=list)  # loads that have not come back
    # by group: pages of the hit that are being loaded, and into which slots
    coming: dict[int, tuple[NDArray[np.intp], Slots]] = field(default_factory=dict)
    explanation: Explanation = field(default_factory=Explanation)
    detached: bool = False  # its path left the tree: what it computes stays private
    released: bool = False  # given back, or lost with pages that broke: to be admitted again
    serial: int = field(default_factory=_serial.__next__)

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 255:
            raise RequestError(f"priority must be from 0 to 255, not {self.priority}")
        self._clear()

    def _clear(self) -> None:
        count = len(self.groups)
        self.table = np.full((count, len(self.path)), NO_SLOT, dtype=np.int32)
        self.owned = np.zeros((count, len(self.path)), dtype=bool)
        self.first_valid, self.whole = [0] * count, [True] * count
        self.running = [NO_SLOTS] * count

    @property
    def ready(self) -> bool:
        """All that was being loaded has landed or failed; ``pages`` is final."""
        return not self.arriving

    @property
    def pages(self) -> int:
        """Committed pages, the hit included."""
        return len(self.path)

    @property
    def capacity(self) -> int:
        """Pages that it has slots for, or had."""
        return int(self.table.shape[1])

    def slots(self, group: str) -> Slots:
        """Block table: ``[capacity in pages]`` int32 device slots of ``group``; -1: none.

        Until the lease is ``ready``, wait for those in ``arriving`` before anything is read."""
        g = self.groups.index(group)
        slots: Slots = self.table[g]
        if g in self.coming:
            pages, targets = self.coming[g]
            slots = slots.copy()
            slots[pages] = targets
        return slots

    def working(self, group: str) -> Slots:
        """``[Group.working]`` int32 device slots of ``group`` for the request's running state."""
        return self.running[self.groups.index(group)]

    def valid_from(self, group: str) -> int:
        """First page of ``group`` that may be read; more than 0 only under ``lenient``."""
        return self.first_valid[self.groups.index(group)]

    def next_cut(self, position: int) -> int | None:
        """The first token position after ``position`` where chunks and re-runs must end, so that
        a snapshot of running state can be taken there; None: no more."""
        return next((cut for cut in self.cuts if cut > position), None)

    def widen(self, pages: int) -> None:
        """Make the block table so many pages wider, without slots."""
        groups, had = len(self.groups), self.capacity
        if pages:
            table = np.full((groups, had + pages), NO_SLOT, dtype=np.int32)
            owned = np.zeros((groups, had + pages), dtype=bool)
            table[:, :had], owned[:, :had] = self.table, self.owned
            self.table, self.owned = table, owned

    def shared(self, g: int) -> NDArray[np.intp]:
        """Pages of a group whose slot is pinned through the page's row."""
        return np.flatnonzero((self.table[g] != NO_SLOT) & ~self.owned[g])

    def end(self) -> None:
        """It has no pages and no slots from now on; whoever ends it has given them back."""
        self.released, self.path = True, NO_IDS
        self._clear()
        self.coming.clear()
        self.arriving.clear()


class Phase(enum.IntEnum):
    """How far a prefetch has come; it only moves on."""

    ASKING = 0  # storage has not said yet what it has
    WAITING = 1  # in line for host memory
    READING = 2  # reads are under way
    DONE = 3  # nothing more will come, or not soon enough
    CLOSED = 4  # the request was admitted or is gone


@dataclass(slots=True, eq=False)
class Prefetch:
    """Storage to host, for a request that has arrived and is not scheduled yet."""

    root: bytes  # of its namespace
    raw: bytes  # token bytes of the prompt's whole pages that a hit may use
    found: Presence  # what memory and storage have of those pages
    phase: Phase = Phase.ASKING
    keys: list[bytes] = field(default_factory=list)  # chained keys of those pages, ...
    names: list[list[Key]] = field(default_factory=list)  # ... and by group, storage's names
    reach: int = 0  # pages that memory and storage together make usable
    gain: int = 0  # tokens that need not be computed if the request waits
    path: Ids = field(default_factory=lambda: NO_IDS)  # each held once
    pinned: list[tuple[int, Ids]] = field(default_factory=list)  # host pins: (group, pages)
    fetched: Ids = field(default_factory=lambda: NO_IDS)  # pages read from storage
    reads: list[Ticket] = field(default_factory=list)  # under way, in their lane's order
    begun: float = field(default_factory=time.monotonic)  # seconds
    serial: int = field(default_factory=_serial.__next__)

    @property
    def waits(self) -> bool:
        """More may come, soon enough."""
        return self.phase < Phase.DONE

    def forsake(self, tickets: Collection[Ticket]) -> None:
        """Wait for no read but these."""
        self.reads = [read for read in self.reads if read in tickets]
        if self.phase is Phase.READING and not self.reads:
            self.phase = Phase.DONE
