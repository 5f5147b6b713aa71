"""Who owns what: every hold, pin and private slot, counted again from its owners.

The invariants, in words:

- A page is held once by each lease, prefetch, waiting line and ticket that knows its id.
- A device slot is pinned by the leases that read it and the tickets that copy from it; a host slot
  by prefetches and by the tickets that copy from it. Only LIVE slots are pinned.
- A slot is free, private to one lease, or of one page's row. What a ticket fills is of a row.
- A page that is not in the tree is dying, and is recycled with its last hold.
- A page of the tree can serve a hit: each group that every hit needs is in a memory tier.
- No page was used later than its ancestor, in groups that need every page.

Where they turn out broken, the pages concerned are dropped, and the counts are those of the owners.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .lease import Lease, Prefetch, Share
from .pages import DEVICE, HOST, NO_SLOT
from .residency import Residency
from .schema import NO_IDS, NO_SLOTS, Ids, InvariantError, Slots
from .transfer import LOAD, SAVE, WRITE, Ticket

log = logging.getLogger(__name__)


class Owned(NamedTuple):
    """What the owners of pages and slots have, counted."""

    holds: NDArray[np.int32]  # [pages]
    pins: NDArray[np.int32]  # [tiers, groups, pages]
    private: list[Slots]  # device slots, by group


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
        """If anything broke: drop it, and believe the owners. A lease that reads another page's
        slot is released. Nobody is in the middle of anything."""
        if not self._broken:
            return
        for lease in [one for one in self._leases.values() if not self._sound(one)]:
            self._leases.pop(lease.serial).end()
        self._residency.recount(*self.count(), np.concatenate(self._broken))
        self._broken.clear()

    def check(self) -> None:
        """Raise InvariantError unless holds, pins and private slots are just those of owners."""
        table = self._residency.table
        if not all(map(self._sound, self._leases.values())):
            raise InvariantError("a lease's slot is not its page's")
        holds, pins, private = self.count()
        if (holds != table.holds).any() or (pins != table.pins).any():
            raise InvariantError("holds or pins without an owner, or owners without them")
        for g, slots in enumerate(private):
            mine, host = self._residency.device.private(g), self._residency.host.private(g)
            if mine != len(slots) or host:
                raise InvariantError("a private slot has no owner")

    def count(self) -> Owned:
        """Holds, pins and private slots, counted anew."""
        table, groups = self._residency.table, self._residency.schema.groups
        holds, pins = np.zeros_like(table.holds), np.zeros_like(table.pins)
        private: list[list[Slots]] = [[NO_SLOTS] for _ in groups]
        for lease in self._leases.values():
            holds[lease.path] += 1
            for g, group in enumerate(groups):
                share = lease.shares[group.name]
                private[g] += [share.slots[share.owned], share.working]
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
                if ticket.kind == SAVE:
                    pins[DEVICE, move.group, move.pages] += 1
                elif ticket.kind in (LOAD, WRITE):
                    pins[HOST, move.group, move.pages] += 1
        return Owned(holds, pins, [np.concatenate(slots) for slots in private])

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
