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
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, NO_SLOTS, Ids, InvariantError, Residence, Slots
from .backup import Line
from .host_share import HostShare
from .lease import Lease, Prefetch
from .pages import DEVICE, HOST, TIERS
from .residency import Residency
from .ticket import READ, Ticket

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return error is not None and self._audit.broke(error, self._pages, self._lease)


class Audit:
    """Checks and repairs the bookkeeping; sees all owners live. Scheduler's thread only."""

    def __init__(
        self,
        residency: Residency,
        leases: dict[int, Lease],
        prefetches: dict[int, Prefetch],
        tickets: list[Ticket],
        lines: Sequence[Line],
        share: HostShare,
        counts: Counter[str],
    ) -> None:
        self._residency, self._share, self._counts = residency, share, counts
        self._leases, self._prefetches = leases, prefetches
        self._tickets, self._lines = tickets, lines
        self._broken: list[Ids] = []  # since the last mend

    def guard(self, *pages: Ids, lease: Lease | None = None) -> Guard:
        """Contain an InvariantError of the block; :meth:`mend` then drops ``pages``.

        Other exceptions propagate, and the bookkeeping is mended before its next use. Either way
        ``lease`` is half changed, so it ends and its pages are dropped."""
        return Guard(self, pages, lease)

    def broke(self, error: BaseException, pages: Sequence[Ids], lease: Lease | None) -> bool:
        """Note that bookkeeping may be wrong; returns whether the error is contained."""
        if lease is not None:
            pages = (lease.path,)
            self._leases.pop(lease.serial, None)
            lease.end()
        contained = isinstance(error, InvariantError)
        if contained:
            log.error("bookkeeping is wrong; some pages are dropped", exc_info=error)
            self._counts["invariant_errors_total"] += 1
        self._broken += [NO_IDS, *(pages if contained else ())]
        return contained

    def mend(self) -> None:
        """If anything broke, drop it and every row that disagrees, and recount the rest.

        Leases that wait for a lost ticket, or read another page's slot, are released; prefetches
        stop waiting for lost tickets. Call it only between operations."""
        if not self._broken:
            return
        residency = self._residency
        filling = self._by_place((tier, g, slots) for tier, g, _, slots in self._targets())
        for tier in residency.tiers:
            self._broken.append(tier.sift(filling[tier.index]))
        for prefetch in self._prefetches.values():
            prefetch.pinned = [
                (g, pages[residency.table.where(HOST, g, pages, Residence.LIVE)])
                for g, pages in prefetch.pinned
            ]
            prefetch.forsake(self._tickets)
        arrivals = [ticket.arrival for ticket in self._tickets]
        for lease in list(self._leases.values()):
            if not self._sound(lease) or any(one not in arrivals for one in lease.arriving):
                del self._leases[lease.serial]
                lease.end()
        kept = [pin for prefetch in self._prefetches.values() for pin in prefetch.pinned]
        reads = (move for one in self._tickets if one.route is READ for move in one.moves)
        self._share.reset([*kept, *((move.group, move.pages) for move in reads)])
        residency.recount(*self.count(), np.concatenate(self._broken))
        self._broken.clear()

    def check(self) -> None:
        """Raise InvariantError unless holds, pins and private slots match their owners."""
        table = self._residency.table
        if not all(map(self._sound, self._leases.values())):
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
            (tier, g, slots[table.slot[tier, g, pages] != slots])
            for tier, g, pages, slots in (*self._sources(), *self._targets())
        )
        for lease in self._leases.values():
            holds[lease.path] += 1
            for g, slots in enumerate(private[DEVICE]):
                own = lease.table[g, lease.owned[g]]
                private[DEVICE][g] = np.concatenate((slots, own, lease.running[g]))
                pins[DEVICE, g, lease.path[lease.shared(g)]] += 1
        for prefetch in self._prefetches.values():
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
        for tier, g, pages, slots in self._sources():
            pins[tier, g, pages] += table.slot[tier, g, pages] == slots
        return Owned(holds, pins, private)

    def _sources(self) -> Iterator[tuple[int, int, Ids, Slots]]:
        """Tier, group, pages and slots that tickets read."""
        for ticket in self._tickets:
            if (tier := ticket.route.source) is not None:
                yield from ((tier, move.group, move.pages, move.source) for move in ticket.moves)

    def _targets(self) -> Iterator[tuple[int, int, Ids, Slots]]:
        """Tier, group, pages and slots that tickets fill."""
        for ticket in self._tickets:
            if (tier := ticket.route.target) is not None:
                yield from ((tier, move.group, move.pages, move.target) for move in ticket.moves)

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
