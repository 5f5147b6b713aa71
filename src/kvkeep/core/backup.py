"""Write policies: which pages are copied to the host and then to storage, and when.

Pages that are computed (write-through) or hit often (selective) wait in a line, held but not
pinned, until the lower tier has room: a slow store never keeps the device from evicting. Pages
evicted while they wait are counted. The store's line pauses while its breaker is open; pages that
the store refused join the line again at their next hit.

Under write-back :meth:`Backup.make_room` copies the device's victims to the host, a page that is
loaded leaves the host, and :meth:`Backup.flush` saves pages that only the device has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, Ids, Residence
from .flight import Flights
from .pages import DEVICE, HOST
from .policy import Policy
from .residency import Residency
from .storage import Breaker
from .ticket import SAVE, WRITE, Move, Route, Ticket

_PINNED_SHARE = 0.5  # of host slots that writes to storage may pin at once


class Line:
    """Pages that wait for one route, in order, by group. Each entry holds its page once."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.entries: list[list[Ids]] = [[] for _ in residency.schema.groups]

    def __len__(self) -> int:
        return sum(map(len, self.entries))

    def add(self, group: int, pages: Ids) -> None:
        """Hold pages and append them."""
        if len(pages):
            self._residency.table.hold(pages)
            self.entries[group].append(pages)

    def put_back(self, group: int, pages: Ids) -> None:
        """Prepend pages that :meth:`take` returned and that are still held."""
        if len(pages):
            self.entries[group].insert(0, pages)

    def take(self, group: int) -> Ids:
        """Remove and return a group's pages, each once and still held: put back or unhold them."""
        entries, self.entries[group] = self.entries[group], []
        if not entries:
            return NO_IDS
        waiting = np.concatenate(entries)
        pages, first, times = np.unique(waiting, return_index=True, return_counts=True)
        while len(again := pages[times > 1]):  # to give back a hold takes distinct ids
            self._residency.unhold(again)
            times -= 1
        return waiting[np.sort(first)]

    def is_longer(self, group: int, most: int) -> bool:
        """More than ``most`` entries of a group wait."""
        return sum(map(len, self.entries[group])) > most


class Backup:
    """Copies pages to lower tiers. Scheduler's thread only."""

    def __init__(self, flights: Flights, policy: Policy, counts: Counter[str]) -> None:
        self._flights, self._policy, self._counts = flights, policy, counts
        self._transfers, self._residency = flights.transfers, (residency := flights.residency)
        self._table, self._groups = residency.table, range(len(residency.schema.groups))
        self._device, self._host = residency.device, residency.host
        self._exclusive = policy.write == "write_back"
        self._unsaved, self._unwritten = Line(residency), Line(residency)
        self.lines = self._unsaved, self._unwritten
        self._copier = Breaker()  # of the copies that make room

    @property
    def leaving(self) -> bool:
        """Copies in flight will free device slots when they land."""
        return any(self._leaving(group) for group in self._groups)

    @property
    def waiting(self) -> bool:
        """Pages wait in a line."""
        return any(map(len, self.lines))

    @property
    def idle(self) -> bool:
        """No page waits, except for a store whose breaker is open."""
        saving = len(self._unsaved) and not self._exclusive
        return not self.waiting or (self._transfers.storage.breaker.open and not saving)

    # --- what goes down

    def add(self, group: int, pages: Ids) -> None:
        """These were committed."""
        if self._policy.write == "write_through":
            self._save(group, pages)

    def hit(self, group: int, pages: Ids) -> None:
        """Note that a hit used these pages, from any tier."""
        table = self._table
        if self._policy.write == "write_through_selective":
            often = table.reused[pages] >= self._policy.write_hits
            self._save(group, pages[often & table.where(HOST, group, pages, Residence.ABSENT)])
        if self._transfers.storage.exists and not self._exclusive and not self._writes(group):
            lacking = pages[~table.stored[group, pages]]
            self._unwritten.add(group, lacking[table.where(HOST, group, lacking, Residence.LIVE)])

    def flush(self) -> None:
        """Write-back: save pages that only the device has, ancestors first."""
        if not self._exclusive or not self._transfers.storage.exists:
            return
        table = self._table
        for group in self._groups:
            only = table.state[DEVICE, group] == Residence.LIVE
            only &= table.state[HOST, group] == Residence.ABSENT
            pages = np.flatnonzero(only & ~table.stored[group] & ~table.dying)
            self._save(group, pages[np.argsort(table.depth[pages], kind="stable")])

    def advance(self) -> None:
        """Start the transfers that there is room for. Called every tick."""
        if self._exclusive:
            for group, slots in enumerate(self._device.capacity):
                self._demote(group, int(self._policy.write_ahead * slots))
        self._depart(SAVE, [Move(g, pages) for g, pages in enumerate(self._next_saves())])
        self._depart(WRITE, [self._next_write(group) for group in self._groups])

    def _depart(self, route: Route, moves: list[Move]) -> None:
        """Hand pages taken from a line, with their holds, to a ticket."""
        if moves := [move for move in moves if len(move.pages)]:
            self._flights.depart(route, moves, self._saved if route is SAVE else self._written)
            for move in moves:
                self._residency.unhold(move.pages)

    # --- room on the device

    def make_room(self, needs: Sequence[int]) -> bool:
        """Free ``needs[g]`` device slots of each group; returns whether that many are free now.

        Write-back may first have to copy pages, whose slots are free in a later tick. If one group
        cannot get its slots, nothing is evicted for the others."""
        device = self._device
        if all(device.free_slots(g) >= need for g, need in enumerate(needs)):
            return True
        if any(device.available(g) < need for g, need in enumerate(needs)):
            return False
        for group, need in enumerate(needs):
            if self._exclusive:
                self._demote(group, need)
            else:
                self._residency.make_room(device, group, need)
        return all(device.free_slots(g) >= need for g, need in enumerate(needs))

    def _demote(self, group: int, wanted: int) -> None:
        """Evict device pages until ``wanted`` slots are free or about to be. A page that the host
        has goes at once, others when their copy lands. If the host lacks room, ancestors are copied
        first. While copies keep failing, pages go uncopied, or the device would stay full."""
        residency, table, device, host = self._residency, self._table, self._device, self._host
        short = wanted - device.free_slots(group) - self._leaving(group)
        while short > 0 and len(pages := device.victims(group, short)):
            short -= len(pages)
            absent = table.where(HOST, group, pages, Residence.ABSENT)
            copies = 0 if self._copier.open else int(np.count_nonzero(absent))
            room = min(copies, residency.make_room(host, group, copies))
            pages = pages[device.evictable(group, pages)]  # some may have ended
            absent = table.where(HOST, group, pages, Residence.ABSENT)
            spare = max(0, int(np.count_nonzero(absent)) - room)
            lost, down = pages[absent][:spare], pages[absent][spare:]
            self._counts["unsaved_pages_total"] += len(lost)
            self._leave(group, np.concatenate((pages[~absent], lost)))
            down = down[device.evictable(group, down)]
            if len(down):
                self._flights.depart(SAVE, [Move(group, down)], self._demoted)

    def _leave(self, group: int, pages: Ids) -> None:
        """Evict these pages from the device."""
        self._device.evicted[group] += len(pages)
        self._residency.drop(self._device, group, pages)

    def _leaving(self, group: int) -> int:
        """Device slots that copies in flight will free."""
        tickets = self._transfers.tickets if self._exclusive else ()
        return sum(ticket.count(group) for ticket in tickets if ticket.then == self._demoted)

    # --- landings

    def _saved(self, ticket: Ticket) -> None:
        with self._flights.landing(ticket):
            for move in ticket.moves:
                self._unwritten.add(move.group, move.arrived)
                self._counts["unsaved_pages_total"] += len(move.lost)

    def _demoted(self, ticket: Ticket) -> None:
        """Land a copy that makes room. Pages that landed leave the device; those in use again leave
        the host instead. Pages that were lost stay, to be copied again."""
        with self._flights.landing(ticket):
            for move in ticket.moves:
                group, pages = move.group, move.arrived
                self._unwritten.add(group, pages)
                gone = self._device.evictable(group, pages)
                self._leave(group, pages[gone])
                self._residency.drop_idle(self._host, group, pages[~gone])
                if move.landed.all():
                    self._copier.success()
                else:
                    self._copier.failure()

    def _written(self, ticket: Ticket) -> None:
        with self._flights.landing(ticket):
            for move in ticket.moves:
                if self._transfers.storage.breaker.open:
                    self._table.hold(move.lost)
                    self._unwritten.put_back(move.group, move.lost)
                else:  # the store may be full: do not retry every tick
                    self._counts["unwritten_pages_total"] += len(move.lost)

    # --- the lines

    def _save(self, group: int, pages: Ids) -> None:
        if self._host.capacity[group]:
            self._unsaved.add(group, pages)
        else:
            self._counts["unsaved_pages_total"] += len(pages)

    def _next_saves(self) -> list[Ids]:
        """By group, pages that may be saved now; the host has room for them."""
        table, host = self._table, self._host
        lines = [self._look(group) for group in self._groups]
        for group, waiting in enumerate(lines):  # first: to make room may end any page
            absent = table.where(HOST, group, waiting, Residence.ABSENT)
            self._residency.make_room(host, group, int(np.count_nonzero(absent)))
        for group, waiting in enumerate(lines):
            fit = table.where(DEVICE, group, waiting, Residence.LIVE) & ~table.dying[waiting]
            self._give_up("unsaved_pages_total", waiting[~fit])
            waiting = waiting[fit]
            absent = table.where(HOST, group, waiting, Residence.ABSENT)
            lines[group], later = _split(waiting, absent, host.free_slots(group))
            self._unsaved.put_back(group, later)
        return lines

    def _look(self, group: int) -> Ids:
        """Unsaved pages that the host lacks; those that it has wait for storage."""
        if self._exclusive and self._writes(group):
            return NO_IDS  # a flush must not evict host pages that storage still lacks
        too_long = self._unsaved.is_longer(group, self._device.capacity[group])
        if not self._host.available(group) and not too_long:
            return NO_IDS  # no room: do not scan the line
        waiting = self._unsaved.take(group)
        there = self._table.where(HOST, group, waiting, Residence.LIVE)
        self._unwritten.add(group, waiting[there])
        self._residency.unhold(waiting[there])
        return waiting[~there]

    def _next_write(self, group: int) -> Move:
        """Pages that may be written to storage now."""
        table, host, storage = self._table, self._host, self._transfers.storage
        share = max(1, int(_PINNED_SHARE * host.capacity[group])) if storage.usable else 0
        room = share - self._flights.count(WRITE, group)
        too_long = self._unwritten.is_longer(group, host.capacity[group])
        if storage.exists and room <= 0 and not too_long:
            return Move(group, NO_IDS)  # as above
        waiting = self._unwritten.take(group)
        if not storage.exists:
            self._give_up("unwritten_pages_total", waiting)
            return Move(group, NO_IDS)
        done = table.stored[group, waiting]
        self._residency.unhold(waiting[done])
        waiting = waiting[~done]
        fit = table.where(HOST, group, waiting, Residence.LIVE) & ~table.dying[waiting]
        self._give_up("unwritten_pages_total", waiting[~fit])
        waiting = waiting[fit]
        ready, later = _split(waiting, np.ones(len(waiting), bool), room)
        self._unwritten.put_back(group, later)
        return Move(group, ready, storage.names(group, table.keys(ready)))

    def _writes(self, group: int) -> bool:
        """Pages of a group wait for storage or are being written."""
        return bool(self._unwritten.entries[group] or self._flights.count(WRITE, group))

    def _give_up(self, why: str, pages: Ids) -> None:
        self._counts[why] += len(pages)
        self._residency.unhold(pages)


def _split(pages: Ids, fit: NDArray[np.bool_], room: int) -> tuple[Ids, Ids]:
    """The first ``room`` pages that are ``fit``, and all others, in order."""
    ready = fit & (np.cumsum(fit) <= room)
    return pages[ready], pages[~ready]
