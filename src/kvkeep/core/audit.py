"""Who owns what: every hold, pin and private slot, counted again from its owners.

The invariants, in words:

- A page is held once by each lease, prefetch, waiting line and ticket that knows its id.
- A device slot is pinned by the leases that read it and the tickets that copy from it; a host slot
  by prefetches and by the tickets that copy from it. Only LIVE slots are pinned.
- A slot is free, private to one lease, or of one page's row. What a ticket reads or fills is of
  a row; if its page lost it, it is private to the ticket.
- A page that is not in the tree is dying, and is recycled with its last hold.
- A page of the tree can serve a hit: each group that every hit needs is in a memory tier.
- No page was used later than its ancestor, in groups that need every page.

Where they turn out broken, the pages concerned are dropped, and all else is counted anew from rows
and owners.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, NO_SLOTS, Ids, InvariantError, Residence, Slots
from .lease import Lease, Prefetch, Share
from .pages import DEVICE, HOST, NO_SLOT, TIERS
from .residency import Residency
from .transfer import LOAD, READ, SAVE, WRITE, Ticket

log = logging.getLogger(__name__)

_FROM = {SAVE: DEVICE, LOAD: HOST, WRITE: HOST}  # the tier that a ticket reads, by kind
_TO = {SAVE: HOST, LOAD: DEVICE, READ: HOST}  # the tier that it fills


class Owned(NamedTuple):
    """What the owners of pages and slots have, counted."""

    holds: NDArray[np.int32]  # [pages]
    pins: NDArray[np.int32]  # [tiers, groups, pages]
    private: list[list[Slots]]  # [tiers][groups]


class Audit:
    """Counts owners again, to check the books and to mend them. The scheduler's thread only.

    Args:
        leases, prefetches, tickets: all there are; they change under the audit.
        lines: gives the id arrays that wait in line, each a hold.
    """

    def __init__(
        self,
        residency: Residency,
        leases: dict[int, Lease],
        prefetches: dict[int, Prefetch],
        lines: Callable[[], list[Ids]],
        tickets: list[Ticket],
        counts: Counter[str],
    ) -> None:
        self._residency, self._counts = residency, counts
        self._leases, self._prefetches = leases, prefetches
        self._lines, self._tickets = lines, tickets
        self._broken: list[Ids] = []  # since the books were mended last

    def broke(self, *pages: Ids) -> None:
        """Bookkeeping of these pages raised InvariantError, which is being handled. They are
        dropped in :meth:`mend`: now somebody may be in the middle of something."""
        log.exception("bookkeeping is wrong; some pages are dropped")
        self._counts["invariant_errors_total"] += 1
        self._broken += [NO_IDS, *pages]

    def mend(self) -> None:
        """If anything broke: drop it and all that disagrees, and believe the rest. A lease that
        reads another page's slot is released. Nobody is in the middle of anything."""
        if not self._broken:
            return
        residency = self._residency
        filling = self._by_place((tier, g, slots) for tier, g, _, slots in self._targets())
        for tier in (residency.device, residency.host):
            self._broken.append(tier.sift(filling[tier.index]))
        for prefetch in self._prefetches.values():
            prefetch.pinned = [
                (g, pages[residency.table.where(HOST, g, pages, Residence.LIVE)])
                for g, pages in prefetch.pinned
            ]
        for lease in [one for one in self._leases.values() if not self._sound(one)]:
            self._leases.pop(lease.serial).end()
        residency.recount(*self.count(), np.concatenate(self._broken))
        self._broken.clear()

    def check(self) -> None:
        """Raise InvariantError unless holds, pins and private slots are just those of owners."""
        table = self._residency.table
        if not all(map(self._sound, self._leases.values())):
            raise InvariantError("a lease's slot is not its page's")
        holds, pins, private = self.count()
        if (holds != table.holds).any() or (pins != table.pins).any():
            raise InvariantError("holds or pins without an owner, or owners without them")
        for tier in (self._residency.device, self._residency.host):
            if any(tier.private(g) != len(slots) for g, slots in enumerate(private[tier.index])):
                raise InvariantError("a private slot has no owner")

    def count(self) -> Owned:
        """Holds, pins and private slots, counted anew."""
        table, groups = self._residency.table, self._residency.schema.groups
        holds, pins = np.zeros_like(table.holds), np.zeros_like(table.pins)
        private = self._by_place(
            (tier, g, slots[table.slot[tier, g, pages] != slots])
            for tier, g, pages, slots in (*self._sources(), *self._targets())
        )
        for lease in self._leases.values():
            holds[lease.path] += 1
            for g, group in enumerate(groups):
                share = lease.shares[group.name]
                own = private[DEVICE][g], share.slots[share.owned], share.working
                private[DEVICE][g] = np.concatenate(own)
                pins[DEVICE, g, lease.path[_shared(share)]] += 1
        for prefetch in self._prefetches.values():
            holds[prefetch.path] += 1
            for g, pages in prefetch.pinned:
                pins[HOST, g, pages] += 1
        for pages in self._lines():
            holds[pages] += 1
        for ticket in self._tickets:
            for move in ticket.moves:
                holds[move.pages] += 1
        for tier, g, pages, slots in self._sources():
            pins[tier, g, pages] += table.slot[tier, g, pages] == slots
        return Owned(holds, pins, private)

    def _sources(self) -> Iterator[tuple[int, int, Ids, Slots]]:
        """Tier, group, pages and slots of what tickets read."""
        for ticket in self._tickets:
            if ticket.kind in _FROM:
                yield from ((_FROM[ticket.kind], m.group, m.pages, m.source) for m in ticket.moves)

    def _targets(self) -> Iterator[tuple[int, int, Ids, Slots]]:
        """The same of what they fill."""
        for ticket in self._tickets:
            if ticket.kind in _TO:
                yield from ((_TO[ticket.kind], m.group, m.pages, m.target) for m in ticket.moves)

    def _by_place(self, found: Iterable[tuple[int, int, Slots]]) -> list[list[Slots]]:
        """``[tiers][groups]``: slots by where they are, each once."""
        slots = [[[NO_SLOTS] for _ in self._residency.schema.groups] for _ in TIERS]
        for tier, group, some in found:
            slots[tier][group].append(some)
        return [[np.unique(np.concatenate(some)) for some in groups] for groups in slots]

    def _sound(self, lease: Lease) -> bool:
        """Whether every page that a lease reads through its row is in just that slot."""
        slot = self._residency.table.slot[DEVICE]
        for g, group in enumerate(self._residency.schema.groups):
            share = lease.shares[group.name]
            at = _shared(share)
            if (slot[g, lease.path[at]] != share.slots[at]).any():
                return False
        return True


def _shared(share: Share) -> NDArray[np.intp]:
    """Where a share has slots that are not its own."""
    return np.flatnonzero((share.slots != NO_SLOT) & ~share.owned)
