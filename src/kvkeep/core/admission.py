"""Admission: grant a prompt a lease on device slots, all or nothing.

Match the prompt in the tree once, pin the part of the hit that is on the device, make room for the
rest, and start loading it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, Ids
from .audit import Audit
from .backup import Backup
from .flight import Flights
from .lease import Lease, Prefetch
from .loading import Loader
from .pages import DEVICE, MANY, ONE, Retention
from .prefetch import Prefetcher
from .slots import Plan
from .touches import Touches


class Admission:
    """Grants leases and grows them. Scheduler's thread only."""

    def __init__(
        self,
        flights: Flights,
        backup: Backup,
        prefetcher: Prefetcher,
        loader: Loader,
        touches: Touches,
        audit: Audit,
    ) -> None:
        self._transfers, self._residency = flights.transfers, (residency := flights.residency)
        self._backup, self._prefetcher, self._loader = backup, prefetcher, loader
        self._touches, self._audit, self._slots = touches, audit, loader.slots
        self._table, self._device, self._host = residency.table, *residency.tiers
        self._groups, self._page_tokens = residency.schema.groups, residency.schema.page_tokens
        self._names = tuple(group.name for group in self._groups)

    def admit(
        self,
        run: NDArray[np.int32],
        raw: memoryview,
        root: bytes,
        chunk: int,
        prefetch: Prefetch | None,
        retention: Retention,
        total: int,
        reuse: bool,
    ) -> Lease | None:
        """See :meth:`Cache.admit`. ``raw``: token bytes of the pages that a hit may use."""
        known = self._residency.tree.match(root, raw) if reuse else NO_IDS
        if total and not self._fits(known, total, chunk):
            return None
        device = self._table.states(DEVICE, known)
        present = self._residency.present(known, device)
        usable = present.usable()
        pages = self._loader.worth(device[:, :usable])
        lease = Lease(self._names, root, known[:pages], retention)
        lease.detached = not retention.keep
        lease.explanation.limited_by = present.limit(usable)
        lease.explanation.skipped = (usable - pages) * self._page_tokens
        fresh = self._pages(min(len(run), pages * self._page_tokens + chunk)) - pages
        self._slots.plan_ends(lease, len(raw) // self._residency.tree.page_bytes, len(known))
        self._slots.plan_cuts(lease, pages, pages + fresh)
        with self._audit.guard(lease=lease):
            self._table.hold(lease.path)
            plan = self._slots.pin_hit(lease, device[:, :pages], present.mask[:, :pages])
            if not self._make_room(plan, fresh):
                self._slots.let_go(lease, 0)
                self._residency.unhold(lease.path)
                return None
            self._table.rank(lease.path, retention)
            self._loader.begin(lease, plan, prefetch.fetched if prefetch else NO_IDS)
            self._slots.reserve_running(lease)
            self._slots.extend(lease, fresh, plan.gaps)
            if pages:
                self._hit(lease)
            if prefetch:
                self._prefetcher.close(prefetch)
            self._audit.leases[lease.serial] = lease  # last: nobody has what broke before
            return lease
        return None

    def grow(self, lease: Lease, tokens: int) -> bool:
        """See :meth:`Cache.grow`."""
        pages = self._pages(tokens)
        more = pages - lease.capacity
        if lease.released or more <= 0:
            return not lease.released
        with self._audit.guard(lease=lease):
            self._slots.plan_cuts(lease, lease.capacity, pages)
            needs = [0 if group.working else more for group in self._groups]
            if not self._backup.make_room(needs):
                return False
            self._slots.extend(lease, more)
            return True
        return False

    def _fits(self, path: Ids, total: int, chunk: int) -> bool:
        """Whether every group has room for ``total`` tokens; pages of ``path`` in use need none."""
        for g, group in enumerate(self._groups):
            need = self._pages(total)
            if group.tail is not None:  # it holds a step's pages only for a moment
                step = 0 if group.working else 1 + self._pages(chunk)  # snapshots need no room
                need = min(need, group.tail + step) + group.working
            shared = np.count_nonzero(self._table.pins[DEVICE, g][path])
            if self._device.available(g) + shared < need:
                return False
        return True

    def _make_room(self, plan: Plan, fresh: int) -> bool:
        """Free device slots for the hit's loads and the first chunk; False: no room now."""
        needs = [
            group.working + len(load) + (0 if group.working else fresh + len(gaps))
            for group, load, gaps in zip(self._groups, plan.load, plan.gaps, strict=True)
        ]
        loads = [(g, load) for g, load in enumerate(plan.load) if len(load)]
        for g, load in loads:  # to make room must not evict what is to be loaded
            self._host.pin(g, load)
        room = self._backup.make_room(needs)
        for g, load in loads:
            self._host.unpin(g, load)
        return room

    def _hit(self, lease: Lease) -> None:
        """Record a hit. ``hits`` keeps a popular tail when longer requests slide past it."""
        table, path = self._table, lease.path
        self._residency.stamp(path)
        table.reused[path] += ONE
        firsts = [group.needed(len(path)).start for group in self._groups]
        for g, group in enumerate(self._groups):
            tail = path[firsts[g] :]
            if group.tail is not None:
                table.hits[g, tail] = np.minimum(table.hits[g, tail] + 1, MANY)
            self._backup.hit(g, tail)
        if self._transfers.storage.usable:
            self._touches.add(table.keys(path), firsts)
        if not all(lease.whole):
            self._audit.counts["lenient_hits_total"] += 1

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_tokens)
