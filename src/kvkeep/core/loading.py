"""Loading: host to device, from a lease's grant until its hit is final.

State that is slower to load than to recompute stays on the host. A lease joins loads in flight
instead of loading a page twice. When all its loads have landed or failed, the hit rule runs again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

import numpy as np

from ..schema import Ids, Residence
from .flight import Flights
from .lease import Lease
from .pages import ABSENT, DEVICE, NO_SLOT, WRITING, States
from .policy import Policy
from .presence import Presence
from .slots import DeviceSlots, Plan
from .ticket import LOAD, Move, Ticket
from .transfer import Recompute

_ORIGINS = ("device", "host", "storage")
_HITS = {tier: f"hit_tokens_total{{tier={tier}}}" for tier in _ORIGINS}


class Loader:
    """All loads in flight. Scheduler's thread only. ``leases``: a live view of all granted."""

    def __init__(
        self,
        flights: Flights,
        recompute: Recompute,
        policy: Policy,
        counts: Counter[str],
        slots: DeviceSlots,
        leases: Mapping[int, Lease],
    ) -> None:
        self._flights, self._recompute = flights, recompute
        self._transfers, self._residency = flights.transfers, (residency := flights.residency)
        self._policy, self._counts, self.slots, self._leases = policy, counts, slots, leases
        self._groups, self._page_tokens = residency.schema.groups, residency.schema.page_tokens
        self._table, self._device = residency.table, residency.device

    def worth(self, device: States) -> int:
        """How many pages of a hit to use: without those on the host if they are slower to load than
        to recompute. Now and then they are loaded all the same, to measure.

        ``device``: the states of the hit on the device."""
        pages: int = device.shape[1]
        if not self._recompute.possible:
            return pages
        here = Presence(self._residency.rule, device != ABSENT)
        known = here.usable()
        lacking = np.count_nonzero(here.rule.needed(pages) & ~here.mask, axis=1).tolist()
        slow = self._recompute.beats_moving(LOAD, lacking, (pages - known) * self._page_tokens)
        return known if slow and not self._transfers.speeds[LOAD].stale else pages

    def begin(self, lease: Lease, plan: Plan, fetched: Ids) -> None:
        """Start the plan's loads, for which the device has room, and join loads in flight.

        ``fetched``: pages that were read from storage for this lease."""
        if any(map(len, (*plan.load, *plan.gaps))):
            self._trace(lease, fetched)
            self._explain(lease)
        else:  # all of it is on the device, or on its way there
            lease.origin = np.zeros(lease.pages, dtype=np.intp)
            lease.explanation.tokens = dict.fromkeys(_ORIGINS, 0)
            lease.explanation.tokens["device"] = lease.pages * self._page_tokens
        lease.arriving += [one.arrival for one in self._flights.filling(LOAD, lease.path)]
        moves = [Move(g, ids) for g, ids in enumerate(plan.load) if len(ids)]
        if moves:
            ticket = self._flights.depart(LOAD, moves, self._loaded)
            lease.arriving.append(ticket.arrival)
            sizes = (len(m.pages) * self._groups[m.group].page_bytes for m in moves)
            lease.explanation.loaded_bytes = sum(sizes)
        if lease.ready:
            self.count(lease)
        else:
            self._foretell(lease)

    def _foretell(self, lease: Lease) -> None:
        """Note the slots being loaded, so that a step can start and wait layer by layer."""
        for g, group in enumerate(self._groups):
            first = max(group.needed(lease.pages).start, lease.first_valid[g])
            writing = self._table.state[DEVICE, g][lease.path[first:]] == WRITING
            at = first + np.flatnonzero(writing)
            if len(at):
                lease.coming[g] = at, self._table.slot[DEVICE, g][lease.path[at]]

    def _loaded(self, ticket: Ticket) -> None:
        """Land a load; clocks do not change.

        Leases stop waiting only at the end: if bookkeeping breaks before, they wait for a ticket
        that is gone, and ``Audit.mend`` releases them. A load that failed stays among those that
        arrive until all have ended, or a step would read slots that it did not fill."""
        waiting = [one for one in self._leases.values() if ticket.arrival in one.arriving]
        coming = {one.arrival for one in self._transfers.on(LOAD)}
        with self._flights.landing(ticket):
            for move in ticket.moves:
                if self._policy.write == "write_back":  # the memory tiers are exclusive
                    self._residency.drop_idle(self._residency.host, move.group, move.arrived)
                self._counts["missed_loads_total"] += len(move.lost)
            for lease in waiting:
                self._take_landed(lease, ticket)
                if coming.isdisjoint(lease.arriving):
                    self._settle(lease, ticket)
        for lease in waiting:
            if coming.isdisjoint(lease.arriving):
                lease.arriving.clear()
            elif not ticket.arrival.failed:
                lease.arriving.remove(ticket.arrival)

    def _take_landed(self, lease: Lease, ticket: Ticket) -> None:
        """Pin what this lease waited for before anything evicts it. Its window may have slid on."""
        hit = min(lease.pages, len(lease.origin))
        for move in ticket.moves:
            g, group = move.group, self._groups[move.group]
            ids = move.arrived
            ids = ids[self._table.depth[ids] < lease.pages]
            at = self._table.depth[ids]
            first = max(group.needed(hit).start, lease.first_valid[g])
            mine = (lease.path[at] == ids) & (lease.table[g, at] == NO_SLOT) & (at >= first)
            self.slots.pin(g, lease, ids[mine])
            if group.tail is not None:
                self.slots.slide(g, lease, group.needed(lease.pages).start)

    def _settle(self, lease: Lease, ticket: Ticket) -> None:
        """All loads landed or failed: apply the hit rule to what is on the device."""
        lease.explanation.load_ms = 1e3 * (time.monotonic() - ticket.submitted)
        lease.coming.clear()
        if lease.pages <= len(lease.origin):  # else it committed more, so all of the hit landed
            self._shorten(lease)
            self._explain(lease)
        self.count(lease)

    def _shorten(self, lease: Lease) -> None:
        """Cut the hit to what the hit rule allows now."""
        live = self._table.state[DEVICE][:, lease.path] == int(Residence.LIVE)
        has = Presence(self._residency.rule, (lease.table[:, : lease.pages] != NO_SLOT) | live)
        pages = has.usable()
        if pages < lease.pages:
            lease.explanation.limited_by = has.limit(pages)
            self.slots.let_go(lease, pages)
            self._residency.unhold(lease.path[pages:])
            lease.path = lease.path[:pages]
        for g, group in enumerate(self._groups):
            needed = group.needed(pages)
            gaps = needed.start + np.flatnonzero(~has.mask[g, needed.start : pages])
            if self._policy.missing != "stale":  # gaps are left only where a hit does without
                lease.whole[g] = not len(gaps)
                lease.first_valid[g] = int(gaps[-1]) + 1 if len(gaps) else 0
            at = np.arange(max(needed.start, lease.first_valid[g]), pages)
            self.slots.pin(g, lease, lease.path[at[(lease.table[g, at] == NO_SLOT) & live[g, at]]])

    def _trace(self, lease: Lease, fetched: Ids) -> None:
        """Note for each page of a hit the lowest tier that any of its groups comes from; for a page
        that no group needs, the lowest tier of the hit."""
        path = lease.path
        needed = self._residency.rule.needed(len(path))
        for g, first in enumerate(lease.first_valid):
            needed[g, :first] = False
        above = ((self._table.state[DEVICE][:, path] != ABSENT) | ~needed).all(axis=0)
        lease.origin = np.where(above, 0, np.where(np.isin(path, fetched), 2, 1))
        lease.origin[~needed.any(axis=0)] = lease.origin.max(initial=0)

    def _explain(self, lease: Lease) -> None:
        pages = np.bincount(lease.origin[: lease.pages], minlength=len(_ORIGINS))
        for tier, count in zip(_ORIGINS, pages.tolist(), strict=True):
            lease.explanation.tokens[tier] = count * self._page_tokens

    def count(self, lease: Lease) -> None:
        """Count a final hit: its loads have ended, or the request has."""
        self._counts["skipped_tokens_total{why=slow_load}"] += lease.explanation.skipped
        for tier, tokens in lease.explanation.tokens.items():
            if tokens:
                self._counts[_HITS[tier]] += tokens
