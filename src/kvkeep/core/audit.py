"""Audit: recount every hold, pin and private slot from its owners, to check and to repair.

Invariants:

- Each lease, prefetch, line entry and ticket move holds its pages once.
- Leases that read a device slot pin it, prefetches pin host slots, and tickets pin the slots that
  they copy from. Only LIVE slots are pinned.
- A slot is free, private to one lease, or owned by one page's row. A ticket's slots belong to
  rows; a slot that its page lost is private to the ticket.
- A page outside the tree is dying; its last unhold recycles it.
- A page in the tree can serve a hit: each group that every hit needs is in a memory tier.
- In groups that need every page, no page was used later than its ancestor.

If one is broken, the audit drops the affected pages and recounts the rest from rows and owners.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, NO_SLOTS, Ids, InvariantError, Residence, Slots
from .backup import Backup
from .flight import Flights
from .host_share import HostShare
from .lease import Lease, Prefetch
from .pages import DEVICE, HOST, TIERS
from .ticket import READ, Move, Route

log = logging.getLogger(__name__)


class Owned(NamedTuple):
    """Holds, pins and private slots of all owners."""

    holds: NDArray[np.int32]  # [pages]
    pins: NDArray[np.int32]  # [tiers, groups, pages]
    private: list[list[Slots]]  # [tiers][groups]


class Guard:
    """See :meth:`Audit.guard`."""

    __slots__ = ("_audit", "_lease", "_pages")

    def __init__(self, audit: Audit, pages: Sequence[Ids], lease: Lease | None) -> None:
        self._audit, self._pages, self._lease = audit, pages, lease

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return error is not None and self._audit.broke(error, self._pages, self._lease)


class Audit:
    """Checks and repairs the bookkeeping; knows all owners. Scheduler's thread only."""

    def __init__(
        self,
        flights: Flights,
        backup: Backup,
        share: HostShare,
        counts: Counter[str],
    ) -> None:
        self._residency, self._tickets = flights.residency, flights.transfers.tickets
        self._lines, self._share, self.counts = backup.lines, share, counts
        self.leases: dict[int, Lease] = {}  # granted, by serial
        self.prefetches: dict[int, Prefetch] = {}  # open, by serial, the oldest first
        self._broken: list[Ids] = []  # since the last mend

    def guard(self, *pages: Ids, lease: Lease | None = None) -> Guard:
        """Contain an InvariantError of the block; :meth:`mend` then drops ``pages``, and those of
        ``lease``. Other exceptions propagate, and the bookkeeping is mended before its next use.
        Either way ``lease`` is half changed, so it ends."""
        return Guard(self, pages, lease)

    def broke(self, error: BaseException, pages: Sequence[Ids], lease: Lease | None) -> bool:
        """Note that bookkeeping may be wrong; returns whether the error is contained."""
        if lease is not None:
            pages = (lease.path,)
            self.leases.pop(lease.serial, None)
            lease.end()
        contained = isinstance(error, InvariantError)
        if contained:
            log.error("bookkeeping is wrong; some pages are dropped", exc_info=error)
            self.counts["invariant_errors_total"] += 1
        self._broken += [NO_IDS, *(pages if contained else ())]
        return contained

    def mend(self) -> None:
        """If anything broke, drop it and every row that disagrees, and recount the rest.

        Leases that wait for a lost ticket, or read another page's slot, are released; prefetches
        stop waiting for lost tickets. Call it only between operations."""
        if not self._broken:
            return
        residency = self._residency
        filling = self._by_place(
            (tier, move.group, slots)
            for route, tier, move, slots in self._ends()
            if tier == route.target
        )
        for tier in residency.tiers:
            self._broken.append(tier.sift(filling[tier.index]))
        for prefetch in self.prefetches.values():
            prefetch.pinned = [
                (g, pages[residency.table.where(HOST, g, pages, Residence.LIVE)])
                for g, pages in prefetch.pinned
            ]
            prefetch.forsake(self._tickets)
        arrivals = [ticket.arrival for ticket in self._tickets]
        for lease in list(self.leases.values()):
            if not self._sound(lease) or any(one not in arrivals for one in lease.arriving):
                del self.leases[lease.serial]
                lease.end()
        kept = [pin for prefetch in self.prefetches.values() for pin in prefetch.pinned]
        reads = (move for one in self._tickets if one.route is READ for move in one.moves)
        self._share.reset([*kept, *((move.group, move.pages) for move in reads)])
        residency.recount(*self.count(), np.concatenate(self._broken))
        self._broken.clear()

    def check(self) -> None:
        """Raise InvariantError unless holds, pins and private slots match their owners."""
        table = self._residency.table
        if not all(map(self._sound, self.leases.values())):
            raise InvariantError("a lease's slot is not its page's")
        holds, pins, private = self.count()
        if (holds != table.holds).any() or (pins != table.pins).any():
            raise InvariantError("holds or pins without an owner, or owners without them")
        for tier in self._residency.tiers:
            if any(tier.private(g) != len(slots) for g, slots in enumerate(private[tier.index])):
                raise InvariantError("a private slot has no owner")

    def count(self) -> Owned:
        table = self._residency.table
        holds, pins = np.zeros_like(table.holds), np.zeros_like(table.pins)
        private = self._by_place(
            (tier, move.group, slots[table.slot[tier, move.group, move.pages] != slots])
            for _, tier, move, slots in self._ends()
        )
        for lease in self.leases.values():
            holds[lease.path] += 1
            for g, slots in enumerate(private[DEVICE]):
                own = lease.table[g, lease.owned[g]]
                private[DEVICE][g] = np.concatenate((slots, own, lease.running[g]))
                pins[DEVICE, g, lease.path[lease.shared(g)]] += 1
        for prefetch in self.prefetches.values():
            holds[prefetch.path] += 1
            for g, pages in prefetch.pinned:
                pins[HOST, g, pages] += 1
        for line in self._lines:
            for entries in line.entries:
                for pages in entries:
                    holds[pages] += 1
        for ticket in self._tickets:
            for pages in ticket.touched():
                holds[pages] += 1
        for route, tier, move, slots in self._ends():
            if tier == route.source:
                at = tier, move.group, move.pages
                pins[at] += table.slot[at] == slots
        return Owned(holds, pins, private)

    def _ends(self) -> Iterator[tuple[Route, int, Move, Slots]]:
        """The ends of all moves in memory, with the route, tier and slots of each."""
        for route, move in ((one.route, move) for one in self._tickets for move in one.moves):
            for tier, slots in (route.source, move.source), (route.target, move.target):
                if tier is not None:
                    yield route, tier, move, slots

    def _by_place(self, found: Iterable[tuple[int, int, Slots]]) -> list[list[Slots]]:
        """``[tiers][groups]``: distinct slots."""
        slots = [[[NO_SLOTS] for _ in self._residency.schema.groups] for _ in TIERS]
        for tier, group, some in found:
            slots[tier][group].append(some)
        return [[np.unique(np.concatenate(some)) for some in groups] for groups in slots]

    def _sound(self, lease: Lease) -> bool:
        """Whether each row that a lease reads through still has the slot in the lease's table."""
        slot = self._residency.table.slot[DEVICE]
        for g in range(len(lease.groups)):
            at = lease.shared(g)
            if (slot[g, lease.path[at]] != lease.table[g, at]).any():
                return False
        return True
