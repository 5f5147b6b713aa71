"""What a lease does with device slots: one group's share of them, from first pin to last.

A slot of a share is either the lease's own (private) or pinned through its page's row.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from ..schema import Ids, Residence
from .lease import Lease, Share
from .pages import ABSENT, DEVICE, HOST, LIVE, MANY, NO_SLOT, WRITING
from .policy import Policy
from .residency import Residency
from .transfer import Move


class DeviceSlots:
    """Operations on shares; ``g`` is the group's index. The scheduler's thread only."""

    def __init__(self, residency: Residency, policy: Policy) -> None:
        self._residency, self._policy = residency, policy
        self._table, self._device, self._host = residency.table, residency.device, residency.host
        self._groups = residency.schema.groups

    def place(
        self, lease: Lease, present: list[NDArray[np.bool_]], fresh: int
    ) -> list[Move] | None:
        """Fill in ``lease.shares``: pin what is there, reserve the rest. Returns what is to be
        loaded, its sources pinned; None if there is no room."""
        plans = [self._pin_hit(g, lease, has) for g, has in enumerate(present)]
        if not self._make_room(
            [
                group.working + len(load) + (0 if group.working else fresh + len(private))
                for group, (load, private) in zip(self._groups, plans, strict=True)
            ]
        ):
            for g, (load, _) in enumerate(plans):
                self._host.unpin(g, load)
            return None
        moves = []
        for g, (group, (load, private)) in enumerate(zip(self._groups, plans, strict=True)):
            working = self._device.reserve(g, group.working)
            target = self._device.reserve(g, len(load))
            assert working is not None  # room was made
            assert target is not None
            lease.shares[group.name].working = working
            self.extend(g, lease, fresh, private)
            moves.append(Move(g, load, self._table.slot[HOST, g][load], target))
        self._table.rank(lease.path, lease.priority)
        return moves

    def _pin_hit(
        self, g: int, lease: Lease, present: NDArray[np.bool_]
    ) -> tuple[Ids, NDArray[np.intp]]:
        """A share with what is on the device, pinned before anything is reserved: that may evict.
        Returns what is to be loaded, its sources pinned, and where private slots go."""
        pages, group = lease.pages, self._groups[g]
        at = np.arange(group.needed(pages).start, pages)
        gaps = at[~present[at]]
        share = Share(np.full(pages, NO_SLOT, np.int32), np.zeros(pages, dtype=bool))
        lease.shares[group.name] = share
        share.whole = not len(gaps)
        if self._policy.missing == "lenient" and len(gaps):
            share.valid_from = int(gaps[-1]) + 1
        ids = lease.path[at[at >= share.valid_from]]
        live = ids[self._table.where(DEVICE, g, ids, Residence.LIVE)]
        self.pin(g, share, live)
        absent = self._table.where(DEVICE, g, ids, Residence.ABSENT)
        load = ids[absent & self._table.where(HOST, g, ids, Residence.LIVE)]
        self._host.pin(g, load)
        return load, gaps[gaps >= share.valid_from]  # "stale": over somebody else's bytes

    def _make_room(self, needs: list[int]) -> bool:
        """Free so many slots of each group. If one cannot have them, nothing has to leave for the
        others; else all that must leave, leaves at once."""
        if any(self._device.available(g) < need for g, need in enumerate(needs)):
            return False
        free = [self._residency.make_room(self._device, g, n) for g, n in enumerate(needs)]
        return all(have >= need for have, need in zip(free, needs, strict=True))

    def plan_snapshots(self, lease: Lease, first: int, last: int) -> None:
        """Interim snapshots in pages ``[first, last)``, as often as the policy says."""
        every = self._policy.snapshot_pages
        if every and any(group.working for group in self._groups):
            pages = range((first // every + 1) * every, last + 1, every)
            more = {page * self._residency.schema.page_tokens for page in pages}
            lease.cuts = sorted(more.union(lease.cuts))

    def pin(self, g: int, share: Share, ids: Ids) -> None:
        share.slots[self._table.depth[ids]] = self._device.pin(g, ids)

    def extend(self, g: int, lease: Lease, count: int, gaps: NDArray[np.intp]) -> bool:
        """Private slots for ``count`` more pages, and for the pages at ``gaps``.

        Snapshots are a luxury: without room for them, their pages go without."""
        if not count and not len(gaps):
            return True
        group = self._groups[g]
        share = lease.shares[group.name]
        more = np.arange(len(share.slots), len(share.slots) + count)
        if group.working:
            more = more[np.isin((more + 1) * self._residency.schema.page_tokens, lease.cuts)]
        at = np.concatenate((more, gaps))
        slots = self._residency.reserve(self._device, g, len(at))
        if slots is None:
            if not group.working:
                return False
            at, slots = at[:0], share.slots[:0]
        share.slots = np.concatenate((share.slots, np.full(count, NO_SLOT, dtype=np.int32)))
        share.owned = np.concatenate((share.owned, np.zeros(count, dtype=bool)))
        share.slots[at] = slots
        share.owned[at] = True
        return True

    def let_go(self, g: int, share: Share, path: Ids, first: int) -> None:
        """Unpin or free everything from page ``first`` on."""
        at = first + np.flatnonzero(share.slots[first:] != NO_SLOT)
        own = share.owned[at]
        self._device.free(g, share.slots[at[own]])
        self._device.unpin(g, path[at[~own]])
        share.slots, share.owned = share.slots[:first], share.owned[:first]

    def publish(self, g: int, lease: Lease, first: int, snapshots: Collection[int]) -> Ids:
        """Rows of ``lease.path[first:]`` without a slot adopt the lease's; where a row has one, the
        lease takes that instead of its own; where one is being filled, both are kept.
        Of a group that keeps snapshots, only those that were taken. Returns the pages whose rows
        adopted."""
        group, path = self._groups[g], lease.path
        share = lease.shares[group.name]
        at = first + np.flatnonzero(share.owned[first : len(path)])
        if group.working:
            at = at[np.isin(at, list(snapshots))]
        state = self._table.state[DEVICE, g][path[at]]
        new, known = at[state == ABSENT], at[state == LIVE]
        self._device.adopt(g, path[new], share.slots[new], Residence.LIVE)
        if len(known):
            self._device.free(g, share.slots[known])
        settled = at[state != WRITING]
        share.owned[settled] = False
        share.slots[settled] = self._device.pin(g, path[settled])
        adopted: Ids = path[new]
        return adopted

    def slide(self, g: int, lease: Lease, start: int) -> None:
        """Let go of pages before ``start``. Out of reach of this request, they are the first to
        be evicted, or a long request's dead pages would outlive idle sessions' useful tails;
        except where many hits ended, and snapshots that one is expected to end at."""
        share, path = lease.shares[self._groups[g].name], lease.path
        gone = np.flatnonzero(share.slots[:start] != NO_SLOT)
        own = share.owned[gone]
        self._device.free(g, share.slots[gone[own]])
        at = gone[~own]
        out = path[at]
        dead = self._table.hits[g, out] < MANY
        if self._groups[g].working:
            ends = (at + 1) * self._residency.schema.page_tokens
            dead &= ~np.isin(ends, list(lease.lasting))
        self._table.used[self._table.clocks[g], out[dead]] = 0
        self._host.offer(g, out[dead])
        self._device.unpin(g, out)
        share.slots[gone] = NO_SLOT
        share.owned[gone] = False
