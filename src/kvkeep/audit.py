"""Who owns what: every hold, pin and private slot, counted again from its owners.

The invariants, in words:

- A page is held once by each lease, prefetch, waiting line and ticket that knows its id.
- A device slot is pinned by the leases that read it and the tickets that copy from it; a host slot
  by prefetches and by the tickets that copy from it. Only LIVE slots are pinned.
- A slot is free, private to one lease, or of one page's row. What a ticket fills is of a row.
- A page that is not in the tree is dying, and is recycled with its last hold.
- A page of the tree can serve a hit: each group that every hit needs is in a memory tier.
- No page was used later than its ancestor, in groups that need every page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .lease import Lease, Prefetch
from .pages import DEVICE, HOST, NO_SLOT
from .residency import Residency
from .schema import Ids, InvariantError
from .transfer import LOAD, SAVE, WRITE, Ticket


class Owned(NamedTuple):
    """What the owners of pages and slots have, counted."""

    holds: NDArray[np.int32]  # [pages]
    pins: NDArray[np.int32]  # [tiers, groups, pages]
    private: list[int]  # device slots, by group


def count_owned(
    residency: Residency,
    leases: Iterable[Lease],
    prefetches: Iterable[Prefetch],
    lines: Iterable[Ids],
    tickets: Iterable[Ticket],
) -> Owned:
    """Count holds, pins and private slots anew."""
    table, groups = residency.table, residency.schema.groups
    holds, pins = np.zeros_like(table.holds), np.zeros_like(table.pins)
    private = [0] * len(groups)
    for lease in leases:
        holds[lease.path] += 1
        for g, group in enumerate(groups):
            share = lease.shares[group.name]
            private[g] += int(np.count_nonzero(share.owned)) + len(share.working)
            at = ((share.slots != NO_SLOT) & ~share.owned).nonzero()[0]
            pages = lease.path[at]
            pins[DEVICE, g][pages] += 1
            if (table.slot[DEVICE, g][pages] != share.slots[at]).any():
                raise InvariantError("a lease's slot is not its page's")
    for prefetch in prefetches:
        holds[prefetch.path] += 1
        for g, pages in prefetch.pinned:
            pins[HOST, g, pages] += 1
    for pages in lines:
        holds[pages] += 1
    for ticket in tickets:
        for move in ticket.moves:
            holds[move.pages] += 1
            if ticket.kind == SAVE:
                pins[DEVICE, move.group, move.pages] += 1
            elif ticket.kind in (LOAD, WRITE):
                pins[HOST, move.group, move.pages] += 1
    return Owned(holds, pins, private)


def check_owned(
    residency: Residency, holds: NDArray[np.int32], pins: NDArray[np.int32], private: list[int]
) -> None:
    """Raise InvariantError unless holds, pins and private slots are just those of their owners."""
    table = residency.table
    if (holds != table.holds).any() or (pins != table.pins).any():
        raise InvariantError("holds or pins without an owner, or owners without them")
    for g, count in enumerate(private):
        if residency.device.private(g) != count or residency.host.private(g) != 0:
            raise InvariantError("a private slot has no owner")
