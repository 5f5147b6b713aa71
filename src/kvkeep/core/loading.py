"""Loading: host to device, from a lease's grant until its hit is final.

What would take longer to load than to compute is left where it is. Pages that are being loaded for
others are joined, not loaded again. When everything that a lease waits for has landed or failed,
the hit rule is run once more, on what is there then.
"""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from ..schema import Ids, Residence
from .backup import Backup
from .lease import Lease
from .pages import DEVICE, NO_SLOT
from .policy import Policy
from .recompute import Recompute
from .residency import Residency
from .slots import DeviceSlots
from .transfer import LOAD, Move, Ticket, Transfers


class Loader:
    """All loads under way. The scheduler's thread only."""

    def __init__(
        self,
        residency: Residency,
        transfers: Transfers,
        slots: DeviceSlots,
        backup: Backup,
        recompute: Recompute,
        policy: Policy,
        counts: Counter[str],
    ) -> None:
        self._residency, self._transfers = residency, transfers
        self._slots, self._backup, self._recompute = slots, backup, recompute
        self._policy, self._counts = policy, counts
        self._schema, self._table = residency.schema, residency.table
        self._device, self._host = residency.device, residency.host

    def worth(self, path: Ids, pages: int) -> int:
        """How many of the first ``pages`` of a path to use: all of them, unless it takes less time
        to compute those that are on the host only. Now and then they are loaded all the same."""
        if not self._recompute.possible:
            return pages
        groups, state = self._schema.groups, self._table.state
        here = [state[DEVICE, g, path[:pages]] != Residence.ABSENT for g in range(len(groups))]
        known = self._schema.usable(here, self._policy.strict)
        size = sum(
            group.record_bytes * int(np.count_nonzero(~has[group.needed(pages).start :]))
            for group, has in zip(groups, here, strict=True)
        )
        gain = (pages - known) * self._schema.page_tokens
        slow = self._recompute.beats_moving(LOAD, size, gain)
        return known if slow and not self._transfers.speeds[LOAD].stale else pages

    def begin(self, lease: Lease, moves: list[Move], fetched: Ids) -> None:
        """Submit what is to be loaded, and join what others are loading already.

        Args:
            moves: host to device, sources pinned and targets reserved; some may be empty.
            fetched: pages that were read from storage for this lease.
        """
        self._trace(lease, fetched)
        self._explain(lease)
        self._join(lease)
        moves = [move for move in moves if len(move.pages)]
        for move in moves:
            self._device.adopt(move.group, move.pages, move.target, Residence.WRITING)
            self._table.hold(move.pages)
            size = self._schema.groups[move.group].page_bytes
            lease.explanation.loaded_bytes += len(move.pages) * size
        if moves:
            self._wait(lease, self._transfers.submit(Ticket(LOAD, moves)))
        if lease.ready:
            self._count(lease)
        else:
            self._foretell(lease)

    def _join(self, lease: Lease) -> None:
        """Wait for what others are loading already."""
        for ticket in self._transfers.pending:
            if ticket.kind == LOAD and ticket.touches(lease.path):
                self._wait(lease, ticket)

    def _wait(self, lease: Lease, ticket: Ticket) -> None:
        ticket.waiters.append(lease)
        lease.arriving.append(ticket.arrival)

    def _foretell(self, lease: Lease) -> None:
        """Note where what is being loaded will be: who waits for each layer may begin."""
        for g, group in enumerate(self._schema.groups):
            first = max(group.needed(lease.pages).start, lease.shares[group.name].valid_from)
            writing = self._table.where(DEVICE, g, lease.path[first:], Residence.WRITING)
            at = first + np.flatnonzero(writing)
            if len(at):
                lease.coming[group.name] = at, self._table.slot[DEVICE, g][lease.path[at]]

    def loaded(self, ticket: Ticket) -> None:
        """A host-to-device ticket came back. Landing stamps nothing."""
        for move in ticket.moves:
            self._device.publish(move.group, move.pages[move.landed])
            self._host.unpin(move.group, move.pages)
            self._residency.drop(self._device, move.group, move.pages[~move.landed])
            self._backup.loaded(move.group, move.pages[move.landed])
            self._counts["missed_loads_total"] += int(np.count_nonzero(~move.landed))
        for lease in ticket.waiters:
            lease.arriving.remove(ticket.arrival)
            if not lease.released:
                self._take_landed(lease, ticket)
            if lease.ready:
                self._settle(lease, ticket)
        for move in ticket.moves:
            self._residency.unhold(move.pages)

    def _take_landed(self, lease: Lease, ticket: Ticket) -> None:
        """Pin what this lease waited for, before anything else may evict it. It may have gone on
        since, and need no more of a window."""
        hit = min(lease.pages, len(lease.origin))
        for move in ticket.moves:
            group = self._schema.groups[move.group]
            share = lease.shares[group.name]
            ids = move.pages[move.landed]
            at = self._table.depth[ids]
            ids, at = ids[at < lease.pages], at[at < lease.pages]
            first = max(group.needed(hit).start, share.valid_from)
            mine = (lease.path[at] == ids) & (share.slots[at] == NO_SLOT) & (at >= first)
            self._slots.pin(move.group, share, ids[mine])
            if group.tail is not None:
                self._slots.slide(move.group, lease, group.needed(lease.pages).start)

    def _settle(self, lease: Lease, ticket: Ticket) -> None:
        """Everything landed or failed: apply the hit rule again, to what is on the device."""
        lease.explanation.load_ms = 1e3 * (time.monotonic() - ticket.submitted)
        lease.coming.clear()
        if not lease.released and lease.pages <= len(lease.origin):  # else it went on, on all of it
            self._apply(lease)
            self._explain(lease)
        self._count(lease)

    def _apply(self, lease: Lease) -> None:
        """The hit rule."""
        has = [
            (lease.shares[group.name].slots[: lease.pages] != NO_SLOT)
            | self._table.where(DEVICE, g, lease.path, Residence.LIVE)
            for g, group in enumerate(self._schema.groups)
        ]
        pages = self._schema.usable(has, self._policy.strict)
        if pages < lease.pages:
            lease.explanation.limited_by = self._schema.limit(has, pages, self._policy.strict)
            for g, group in enumerate(self._schema.groups):
                self._slots.let_go(g, lease.shares[group.name], lease.path, pages)
            self._residency.unhold(lease.path[pages:])
            lease.path = lease.path[:pages]
        for g, group in enumerate(self._schema.groups):
            share, needed = lease.shares[group.name], group.needed(pages)
            gaps = needed.start + np.flatnonzero(~has[g][needed.start : pages])
            if self._policy.missing != "stale":  # gaps are left only where a hit does without
                share.whole = not len(gaps)
                share.valid_from = int(gaps[-1]) + 1 if len(gaps) else 0
            at = np.arange(max(needed.start, share.valid_from), pages)
            self._slots.pin(g, share, lease.path[at[share.slots[at] == NO_SLOT]])

    def _trace(self, lease: Lease, fetched: Ids) -> None:
        """Note for each page of a hit the lowest tier that any group of it comes from; for one
        that no group needs any more, the lowest of all."""
        path = lease.path
        above, needed = np.ones(len(path), dtype=bool), np.zeros(len(path), dtype=bool)
        for g, group in enumerate(self._schema.groups):
            first = max(group.needed(len(path)).start, lease.shares[group.name].valid_from)
            above[first:] &= ~self._table.where(DEVICE, g, path[first:], Residence.ABSENT)
            needed[first:] = True
        lease.origin = np.where(above, 0, np.where(np.isin(path, fetched), 2, 1))
        lease.origin[~needed] = lease.origin.max(initial=0)

    def _explain(self, lease: Lease) -> None:
        """Say where the hit's tokens come from."""
        pages = np.bincount(lease.origin[: lease.pages], minlength=3)
        for tier, count in zip(("device", "host", "storage"), pages.tolist(), strict=True):
            lease.explanation.tokens[tier] = count * self._schema.page_tokens

    def _count(self, lease: Lease) -> None:
        """The hit is final."""
        self._counts["skipped_tokens_total{why=slow_load}"] += lease.explanation.skipped
        for tier, tokens in lease.explanation.tokens.items():
            self._counts[f"hit_tokens_total{{tier={tier}}}"] += tokens
