"""Device slots of leases: pin, reserve, publish, slide, let go.

A slot in a lease's block table is private to the lease or pinned through its page's row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, Ids, InvariantError, Residence, Slots
from .backup import Backup
from .lease import Lease
from .pages import ABSENT, DEVICE, LIVE, MANY, NO_SLOT, WRITING, States, count
from .policy import Policy
from .presence import Mask
from .residency import Residency
from .tier import Groups

Gaps = list[NDArray[np.intp]]
"""By group, pages of a path that get private slots instead of the row's."""


class Plan(NamedTuple):
    """By group, what a hit still needs on the device."""

    load: list[Ids]  # pages to load from the host
    gaps: Gaps


class _Set(NamedTuple):
    """Groups of which every hit needs the same pages, changed by one NumPy call."""

    groups: tuple[int, ...]
    rows: slice | list[int]  # ``groups`` as an array index


def _rows(groups: tuple[int, ...]) -> slice | list[int]:
    """A slice if the groups are consecutive, so that NumPy makes views."""
    first, end = groups[0], groups[-1] + 1
    return slice(first, end) if end - first == len(groups) else list(groups)


class DeviceSlots:
    """Operations on the block tables of leases. Scheduler's thread only."""

    def __init__(self, residency: Residency, backup: Backup, policy: Policy) -> None:
        self._residency, self._backup, self._policy = residency, backup, policy
        self._table, self._device = residency.table, residency.device
        self._groups = groups = residency.schema.groups
        self._every = tuple(range(len(groups)))
        whole = tuple(g for g in self._every if groups[g].tail is None)
        sets = [whole, *((g,) for g in self._every if groups[g].tail is not None)]
        self._sets = [_Set(some, _rows(some)) for some in sets if some]
        self._page_tokens = residency.schema.page_tokens
        self.snapshots_kept = any(group.working for group in self._groups)

    def pin_hit(self, lease: Lease, device: States, present: Mask) -> Plan:
        """Pin what the device has of a new lease's path, and note its slots in the block table.

        Args:
            device: the states of its pages on the device.
            present: see :meth:`Residency.present`.
        """
        plan = Plan([NO_IDS] * len(self._groups), [NO_IDS] * len(self._groups))
        for groups, rows in self._sets:
            first = self._groups[groups[0]].needed(lease.pages).start
            live = device[rows, first:] == LIVE
            if count(live) == live.size:
                lease.table[rows, first:] = self._device.pin(groups, lease.path[first:])
            else:
                for g in groups:
                    part = self._pin_part(g, lease, first, device[g], present[g])
                    plan.load[g], plan.gaps[g] = part
        return plan

    def _pin_part(
        self, g: int, lease: Lease, first: int, device: NDArray[np.uint8], present: Mask
    ) -> tuple[Ids, NDArray[np.intp]]:
        """Pin what the device has of one group from page ``first`` on; returns load and gaps."""
        gaps = first + np.flatnonzero(~present[first:])
        lease.whole[g] = not len(gaps)
        if self._policy.missing == "lenient" and len(gaps):
            lease.first_valid[g] = first = int(gaps[-1]) + 1
            gaps = gaps[:0]
        ids = lease.path[first:]
        self.pin(g, lease, ids[device[first:] == LIVE])
        load = ids[present[first:] & (device[first:] == ABSENT)]
        return load, gaps  # under "stale", gaps get slots with other pages' bytes

    def pin(self, g: int, lease: Lease, ids: Ids) -> None:
        """Pin pages that are LIVE on the device and note their slots in the block table."""
        if len(ids):
            lease.table[g, self._table.depth[ids]] = self._device.pin(g, ids)

    def plan_ends(self, lease: Lease, whole: int, known: int) -> None:
        """Plan cuts where hits are expected to end: at the end of the prompt's ``whole`` pages and
        of its ``known`` ones, where other prompts may branch off."""
        if self.snapshots_kept:
            ends = (pages for pages in sorted({whole, known}) if pages > lease.pages)
            lease.cuts = [pages * self._page_tokens for pages in ends]
            lease.lasting = frozenset(lease.cuts)

    def plan_cuts(self, lease: Lease, first: int, last: int) -> None:
        """Plan cuts for interim snapshots in pages ``[first, last)``, as the policy asks."""
        every = self._policy.snapshot_pages
        if every and self.snapshots_kept:
            pages = range((first // every + 1) * every, last + 1, every)
            lease.cuts = sorted({*lease.cuts, *(page * self._page_tokens for page in pages)})

    def reserve_running(self, lease: Lease) -> None:
        """Reserve slots for recurrent state; the caller has made room."""
        for g, group in enumerate(self._groups):
            if group.working:
                lease.running[g] = self._reserve(g, group.working)

    def free_running(self, lease: Lease) -> None:
        """Free what :meth:`reserve_running` reserved."""
        for g, group in enumerate(self._groups):
            if group.working:
                self._device.free(g, lease.running[g])

    def extend(self, lease: Lease, pages: int, gaps: Gaps | None = None) -> None:
        """Reserve private slots for ``pages`` more pages and ``gaps``; the caller has made room.
        For snapshots this makes room; if there is none, their pages get no slots."""
        lease.widen(pages)
        if not self.snapshots_kept and not any(map(len, gaps or ())):
            if pages:
                fresh = self._reserve(self._every, pages)
                lease.table[:, -pages:], lease.owned[:, -pages:] = fresh, True
            return
        more = np.arange(lease.capacity - pages, lease.capacity)
        cuts = more[np.isin((more + 1) * self._page_tokens, lease.cuts)]
        wanted = [cuts if group.working else more for group in self._groups]
        if gaps is not None:
            wanted = [np.concatenate(both) for both in zip(wanted, gaps, strict=True)]
        snapshots = [
            len(at) if g.working else 0 for g, at in zip(self._groups, wanted, strict=True)
        ]
        self._backup.make_room(snapshots)
        for g, at in enumerate(wanted):
            if snapshots[g] <= self._device.free_slots(g) and len(at):
                lease.table[g, at], lease.owned[g, at] = self._reserve(g, len(at)), True

    def _reserve(self, groups: Groups, wanted: int) -> Slots:
        slots = self._device.reserve(groups, wanted)
        if slots is None:
            raise InvariantError("slots are reserved before room was made")
        return slots

    def let_go(self, lease: Lease, first: int) -> None:
        """Unpin or free everything from page ``first`` on."""
        path = lease.path[first:]
        for groups, rows in self._sets:
            slots, own = lease.table[rows, first:], lease.owned[rows, first:]
            private, shared = count(own), slots[:, : len(path)] != NO_SLOT
            if private:
                shared &= ~own[:, : len(path)]
            if count(shared) == shared.size:
                self._device.unpin(groups, path)
            else:
                for g, mine in zip(groups, shared, strict=True):
                    self._device.unpin(g, path[mine])
            if private:
                for g, has, mine in zip(groups, slots, own, strict=True):
                    self._device.free(g, has[mine])
        lease.table, lease.owned = lease.table[:, :first], lease.owned[:, :first]

    def publish(
        self, lease: Lease, first: int, snapshots: Collection[int]
    ) -> Iterator[tuple[int, Ids]]:
        """Commit ``lease.path[first:]``. An ABSENT row adopts the lease's slot; if a row is LIVE,
        the lease pins that and frees its own; if it is WRITING, both stay. ``snapshots``: see
        :meth:`Cache.commit`. Yields groups with their pages whose rows adopted a slot."""
        ids, part = lease.path[first:], slice(first, len(lease.path))
        state = self._table.states(DEVICE, ids)
        for groups, rows in self._sets:
            own = lease.owned[rows, part]
            simple = count(own) == own.size and not count(state[rows])
            if simple and all(lease.whole[g] and not self._groups[g].working for g in groups):
                self._device.adopt(groups, ids, lease.table[rows, part], Residence.LIVE)
                self._device.pin(groups, ids)
                lease.owned[rows, part] = False
                yield from ((g, ids) for g in groups)
            else:
                yield from ((g, self._publish_part(g, lease, first, snapshots)) for g in groups)

    def _publish_part(self, g: int, lease: Lease, first: int, snapshots: Collection[int]) -> Ids:
        """Publish one group; returns pages whose rows adopted a slot."""
        path = lease.path
        at = first + np.flatnonzero(lease.owned[g, first : len(path)])
        if not lease.whole[g]:
            return NO_IDS  # what follows a gap is of no use to others
        if self._groups[g].working:
            at = at[np.isin(at, list(snapshots))]
        state = self._table.state[DEVICE, g][path[at]]
        new, known = at[state == ABSENT], at[state == LIVE]
        self._device.adopt(g, path[new], lease.table[g, new], Residence.LIVE)
        self._device.free(g, lease.table[g, known])
        settled = at[state != WRITING]
        lease.owned[g, settled] = False
        lease.table[g, settled] = self._device.pin(g, path[settled])
        adopted: Ids = path[new]
        return adopted

    def slide(self, g: int, lease: Lease, start: int) -> None:
        """Let go of pages before ``start`` as the next victims: a long request's dead pages must
        not outlive idle sessions' tails. Popular tails and lasting snapshots keep their age."""
        at = np.flatnonzero(lease.table[g, :start] != NO_SLOT)
        if not len(at):
            return
        own = lease.owned[g, at]
        shared = at[~own]
        out = lease.path[shared]
        dead = self._table.hits[g, out] < MANY
        if self._groups[g].working:
            dead &= ~np.isin((shared + 1) * self._page_tokens, list(lease.lasting))
        self._table.used[self._table.clocks[g], out[dead]] = 0
        self._residency.host.offer(g, out[dead])
        self._device.free(g, lease.table[g, at[own]])
        self._device.unpin(g, out)
        lease.table[g, at], lease.owned[g, at] = NO_SLOT, False
