"""What a caller of the cache holds: a lease on pages, a prefetch under way, and why a hit was as
long as it was. Only the cache changes them; everybody reads them on the scheduler's thread."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..media.arrival import Arrival
from ..schema import NO_IDS, NO_SLOTS, Ids, Key, RequestError, Slots

_serial = itertools.count()


@dataclass(slots=True)
class Explanation:
    """Where a request's prefix came from, and what kept it from being longer."""

    tokens: dict[str, int] = field(default_factory=dict)  # by tier: "device", "host", "storage"
    limited_by: str | None = None  # the group whose absence ended the hit; None: nothing did
    skipped: int = 0  # tokens that were on the host, and faster to compute than to load
    loaded_bytes: int = 0  # host to device
    load_ms: float = 0.0  # from admit until the last page had landed


@dataclass(slots=True)
class Share:
    """One group's part of a lease.

    ::

        page     0        valid_from       len(lease.path)       len(slots)
                 |  absent  |   committed: slot or -1  |   private    |
    """

    slots: Slots  # device slot of each page; -1: none (absent, or slid out of reach)
    owned: NDArray[np.bool_]  # True: the lease's own; False: pinned through the page's row
    valid_from: int = 0  # pages before this one hold nothing that may be read
    whole: bool = True  # False: its prefix has gaps, so what follows stays private
    working: Slots = field(default_factory=lambda: NO_SLOTS)  # running state


@dataclass(slots=True)
class Lease:
    """A request's hold on device slots. Read ``slots`` after each call: commit may repoint."""

    namespace: str
    path: Ids  # page ids of the committed pages, in order; each is held
    shares: dict[str, Share]  # by group name
    # of each page of the hit, lowest tier it came from: 0 device, 1 host, 2 storage
    origin: NDArray[np.intp] = field(default_factory=lambda: NO_IDS)
    cuts: list[int] = field(default_factory=list)  # token positions, sorted: see next_cut
    lasting: frozenset[int] = frozenset()  # those of them that hits are expected to end at
    arriving: list[Arrival] = field(default_factory=list)  # loads that have not come back
    # by group: pages of the hit that are being loaded, and into which slots
    coming: dict[str, tuple[NDArray[np.intp], Slots]] = field(default_factory=dict)
    explanation: Explanation = field(default_factory=Explanation)
    priority: int = 0  # of its pages, where eviction is by priority
    detached: bool = False  # its path left the tree: what it computes stays private
    released: bool = False  # given back, or lost with pages that broke: to be admitted again
    serial: int = field(default_factory=_serial.__next__)

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 255:
            raise RequestError(f"priority must be from 0 to 255, not {self.priority}")

    @property
    def ready(self) -> bool:
        """All that was being loaded has landed or failed; ``pages`` is final."""
        return not self.arriving

    @property
    def pages(self) -> int:
        """Committed pages, the hit included."""
        return len(self.path)

    def slots(self, group: str) -> Slots:
        """Block table: ``[capacity in pages]`` int32 device slots of ``group``; -1: none.

        Until the lease is ``ready``, wait for those in ``arriving`` before anything is read."""
        slots = self.shares[group].slots
        if group in self.coming:
            pages, targets = self.coming[group]
            slots = slots.copy()
            slots[pages] = targets
        return slots

    def working(self, group: str) -> Slots:
        """``[Group.working]`` int32 device slots of ``group`` for the request's running state."""
        return self.shares[group].working

    def next_cut(self, position: int) -> int | None:
        """The first token position after ``position`` where chunks and re-runs must end, so that
        a snapshot of running state can be taken there; None: no more."""
        return next((cut for cut in self.cuts if cut > position), None)

    def end(self) -> tuple[Ids, dict[str, Share]]:
        """It has no pages and no slots from now on. Returns what it had, still to be let go."""
        had = self.path, self.shares
        self.released, self.path = True, NO_IDS
        self.shares = {name: Share(NO_SLOTS, np.zeros(0, dtype=bool)) for name in self.shares}
        self.coming.clear()
        return had

    def valid_from(self, group: str) -> int:
        """First page of ``group`` that may be read; more than 0 only under ``lenient``."""
        return self.shares[group].valid_from


@dataclass(slots=True)
class Prefetch:
    """Storage to host, for a request that has arrived and is not scheduled yet."""

    namespace: str
    raw: bytes  # token bytes of the prompt's whole pages that a hit may use
    keys: list[bytes] = field(default_factory=list)  # chained keys of those pages, ...
    names: list[list[Key]] = field(default_factory=list)  # ... and by group, storage's names
    present: list[NDArray[np.bool_]] = field(default_factory=list)  # by group: memory or storage
    reach: int = 0  # pages that memory and storage together make usable
    path: Ids = field(default_factory=lambda: NO_IDS)  # each held once
    pinned: list[tuple[int, Ids]] = field(default_factory=list)  # host pins: (group, pages)
    fetched: Ids = field(default_factory=lambda: NO_IDS)  # from storage
    gain: int = 0  # tokens that need not be computed if it waits
    reads: list[Any] = field(default_factory=list)  # tickets under way, in their lane's order
    queued: bool = False  # in line for host memory
    done: bool = False  # nothing more will come, or not soon enough
    closed: bool = False
    begun: float = field(default_factory=time.monotonic)  # seconds
    serial: int = field(default_factory=_serial.__next__)
