"""Write policies: which pages go to the host and when; what is there goes on to storage.

Pages that are computed (write-through) or hit often (selective) wait here in line, held but not
pinned, until the lower tier has room for them, so a slow or stalled store never keeps the device
from evicting. What was evicted while it waited is counted. While storage is out of order its line
waits; what it did not take is lined up once more when it is hit. Under write-back nothing waits: a
page goes to the host when the device must evict it, and leaves the host when it is loaded. What the
device still has in the end is lined up by :meth:`Backup.flush`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, NO_SLOTS, Ids, Residence
from .breaker import Breaker
from .pages import DEVICE, HOST
from .policy import Policy
from .residency import Residency
from .transfer import SAVE, WRITE, Move, Ticket, Transfers

_PINNED_SHARE = 0.5  # of the host's slots that storage writes may pin at once


class Backup:
    """Lines of pages on their way down. The scheduler's thread only.

    Each line is a list of id arrays per group; every entry holds its pages once, and hands that
    hold to the ticket that moves them.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: Transfers,
        policy: Policy,
        counts: Counter[str],
        apply: Callable[[Ticket], None],
    ) -> None:
        """``apply``: what to do with a ticket that came back; it never raises InvariantError."""
        self._apply = apply
        self._residency, self._transfers, self._counts = residency, transfers, counts
        self._policy = policy
        self._exclusive = policy.write == "write_back"
        if self._exclusive:
            residency.demote = self.demote
        groups = len(residency.schema.groups)
        self._unsaved: list[list[Ids]] = [[] for _ in range(groups)]  # to the host
        self._unwritten: list[list[Ids]] = [[] for _ in range(groups)]  # to storage
        self._demotions: list[Ticket] = []  # copies under way for room on the device
        self._copier = Breaker()  # what makes them

    @property
    def leaving(self) -> bool:
        """Device slots will be free when copies under way have landed."""
        return self._exclusive and any(map(self._leaving, range(len(self._unsaved))))

    @property
    def waiting(self) -> bool:
        """Something waits in line; transfers may be under way besides."""
        return any(self._unsaved) or any(self._unwritten)

    @property
    def idle(self) -> bool:
        """Nothing waits in line, unless it cannot go on before storage is in order again."""
        saving = any(self._unsaved) and not self._exclusive
        return not self.waiting or (self._transfers.breaker.open and not saving)

    def add(self, group: int, pages: Ids) -> None:
        """These were committed."""
        if self._policy.write == "write_through":
            self._line_up(group, pages)

    def hit(self, group: int, pages: Ids) -> None:
        """These were hit, in any tier."""
        table = self._residency.table
        if self._policy.write == "write_through_selective":
            often = table.reused[pages] >= self._policy.write_hits
            self._line_up(group, pages[often & table.where(HOST, group, pages, Residence.ABSENT)])
        busy = self._unwritten[group] or self._writing(group)  # with these, perhaps
        if self._transfers.has_store and not self._exclusive and not busy:
            lacking = pages[~table.stored[group, pages]]
            lacking = lacking[table.where(HOST, group, lacking, Residence.LIVE)]
            table.hold(lacking)
            self._append(self._unwritten, group, lacking)

    def loaded(self, group: int, pages: Ids) -> None:
        """These were copied from the host to the device."""
        if self._exclusive:
            host = self._residency.host
            self._residency.drop(host, group, pages[host.evictable(group, pages)])

    def flush(self) -> None:
        """Write-back: line up what storage would lack if the device were gone, ancestors first."""
        if not self._exclusive or not self._transfers.has_store:
            return
        table = self._residency.table
        for group in range(len(self._unsaved)):
            only = table.state[DEVICE, group] == Residence.LIVE
            only &= table.state[HOST, group] == Residence.ABSENT
            pages = np.flatnonzero(only & ~table.stored[group] & ~table.dying)
            self._line_up(group, pages[np.argsort(table.depth[pages], kind="stable")])

    def _line_up(self, group: int, pages: Ids) -> None:
        if not self._residency.host.capacity[group]:
            self._counts["unsaved_pages_total"] += len(pages)
        else:
            self._residency.table.hold(pages)
            self._append(self._unsaved, group, pages)

    def demote(self, group: int, count: int) -> None:
        """Write-back: make room for ``count`` more pages on the device. What the host has goes at
        once, the rest when its copy has landed; if the host lacks room, ancestors come first.
        What fails to land stays, to be copied again; only while copies keep failing pages go
        without, or the device would be full for ever."""
        residency, table = self._residency, self._residency.table
        device, host = residency.device, residency.host
        count -= self._leaving(group)
        while count > 0 and len(pages := device.victims(group, count)):
            count -= len(pages)
            absent = table.where(HOST, group, pages, Residence.ABSENT)
            wanted = 0 if self._copier.open else int(np.count_nonzero(absent))
            room = min(wanted, residency.make_room(host, group, wanted))
            pages = pages[device.evictable(group, pages)]  # some may have ended
            absent = table.where(HOST, group, pages, Residence.ABSENT)
            spare = max(0, int(np.count_nonzero(absent)) - room)
            lost, down = pages[absent][:spare], pages[absent][spare:]
            self._counts["unsaved_pages_total"] += len(lost)
            self._leave(group, np.concatenate((pages[~absent], lost)))
            down = down[device.evictable(group, down)]
            slots = host.reserve(group, len(down))
            if slots is not None and len(down):
                table.hold(down)
                source = device.pin(group, down)
                host.adopt(group, down, slots, Residence.WRITING)
                ticket = Ticket(SAVE, [Move(group, down, source, slots)])
                self._demotions.append(self._transfers.submit(ticket))
        for ticket in self._transfers.landed(SAVE):
            self._apply(ticket)

    def _leaving(self, group: int) -> int:
        """Device slots that copies under way are about to free."""
        return _count(self._demotions, group)

    def _writing(self, group: int) -> int:
        """Host slots that writes under way pin."""
        pending = self._transfers.pending
        return _count((ticket for ticket in pending if ticket.kind == WRITE), group)

    def _leave(self, group: int, pages: Ids) -> None:
        """These are evicted from the device."""
        self._residency.device.evicted[group] += len(pages)
        self._residency.drop(self._residency.device, group, pages)

    def _demoted(self, move: Move) -> None:
        """What the host has now leaves the device, unless it was hit meanwhile."""
        group, pages = move.group, move.pages[move.landed]
        gone = self._residency.device.evictable(group, pages)
        self._leave(group, pages[gone])
        self.loaded(group, pages[~gone])
        self._residency.unhold(move.pages[~move.landed])
        if move.landed.all():
            self._copier.success()
        else:
            self._copier.failure()

    def advance(self) -> None:
        """Start what there is room for. Called every tick."""
        if self._exclusive:
            ahead = self._policy.write_ahead
            for group, slots in enumerate(self._residency.device.capacity):
                self._residency.make_room(self._residency.device, group, int(ahead * slots))
        self._submit(SAVE, [self._next_save(g) for g in range(len(self._unsaved))])
        self._submit(WRITE, [self._next_write(g) for g in range(len(self._unwritten))])

    def _submit(self, kind: str, moves: list[Move | None]) -> None:
        under_way = [move for move in moves if move is not None]
        if under_way:
            self._transfers.submit(Ticket(kind, under_way))

    def _next_save(self, group: int) -> Move | None:
        residency, table = self._residency, self._residency.table
        if self._exclusive and (self._unwritten[group] or self._writing(group)):
            return None  # a flush: nothing is to take the place of what storage has not got yet
        capacity, line = residency.device.capacity[group], self._unsaved[group]
        if not residency.host.available(group) and sum(map(len, line)) <= capacity:
            return None  # a long line is not looked through in vain
        waiting = self._take(self._unsaved, group)
        if not len(waiting):
            return None
        at_host = table.where(HOST, group, waiting, Residence.LIVE)
        self._append(self._unwritten, group, waiting[at_host])
        waiting = waiting[~at_host]
        absent = table.where(HOST, group, waiting, Residence.ABSENT)
        room = residency.make_room(residency.host, group, int(np.count_nonzero(absent)))
        fit = table.where(DEVICE, group, waiting, Residence.LIVE) & ~table.dying[waiting]
        self._give_up("unsaved_pages_total", waiting[~fit])  # some may have ended to make room
        ready, later = _split(waiting[fit], absent[fit], room)
        self._put_back(self._unsaved, group, later)
        slots = residency.host.reserve(group, len(ready))
        if slots is None or not len(ready):
            return None
        source = residency.device.pin(group, ready)
        residency.host.adopt(group, ready, slots, Residence.WRITING)
        return Move(group, ready, source, slots)

    def saved(self, ticket: Ticket) -> None:
        """A device-to-host ticket came back."""
        residency = self._residency
        demotion = ticket in self._demotions
        if demotion:
            self._demotions.remove(ticket)
        for move in ticket.moves:
            residency.device.unpin(move.group, move.pages)
            residency.host.publish(move.group, move.pages[move.landed])
            residency.drop(residency.host, move.group, move.pages[~move.landed])
            self._append(self._unwritten, move.group, move.pages[move.landed])
            if demotion:
                self._demoted(move)
            else:
                self._give_up("unsaved_pages_total", move.pages[~move.landed])

    def _next_write(self, group: int) -> Move | None:
        residency, table = self._residency, self._residency.table
        capacity, line = residency.host.capacity[group], self._unwritten[group]
        share = max(1, int(_PINNED_SHARE * capacity)) if self._transfers.storage else 0
        room = share - self._writing(group)
        if self._transfers.has_store and room <= 0 and sum(map(len, line)) <= capacity:
            return None  # as above
        waiting = self._take(self._unwritten, group)
        if not len(waiting):
            return None
        if not self._transfers.has_store:
            self._give_up("unwritten_pages_total", waiting)
            return None
        done = table.stored[group, waiting]
        residency.unhold(waiting[done])
        waiting = waiting[~done]
        fit = table.where(HOST, group, waiting, Residence.LIVE) & ~table.dying[waiting]
        self._give_up("unwritten_pages_total", waiting[~fit])
        waiting = waiting[fit]
        ready, later = _split(waiting, np.ones(len(waiting), bool), room)
        self._put_back(self._unwritten, group, later)
        if not len(ready):
            return None
        keys = self._transfers.names(group, table.keys(ready))
        return Move(group, ready, residency.host.pin(group, ready), NO_SLOTS, keys)

    def written(self, ticket: Ticket) -> None:
        """A host-to-storage ticket came back."""
        residency = self._residency
        for move in ticket.moves:
            residency.host.unpin(move.group, move.pages)
            landed = move.pages[move.landed]
            residency.table.stored[move.group, landed] = True
            residency.unhold(landed)
            if self._transfers.breaker.open:
                self._put_back(self._unwritten, move.group, move.pages[~move.landed])
            else:  # it may be full: it is not to be asked every tick
                self._give_up("unwritten_pages_total", move.pages[~move.landed])

    def _take(self, lines: list[list[Ids]], group: int) -> Ids:
        """All of one line, each page once: further entries give their holds back."""
        line, lines[group] = lines[group], []
        if not line:
            return NO_IDS
        waiting = np.concatenate(line)
        first = np.zeros(len(waiting), dtype=bool)
        first[np.unique(waiting, return_index=True)[1]] = True
        for page in waiting[~first]:
            self._residency.unhold(page[None])
        return waiting[first]

    def _append(self, lines: list[list[Ids]], group: int, pages: Ids) -> None:
        if len(pages):
            lines[group].append(pages)

    def _put_back(self, lines: list[list[Ids]], group: int, pages: Ids) -> None:
        """They go before all that came meanwhile."""
        if len(pages):
            lines[group].insert(0, pages)

    def _give_up(self, why: str, pages: Ids) -> None:
        self._counts[why] += len(pages)
        self._residency.unhold(pages)

    def held(self) -> list[Ids]:
        """Id arrays in line, each a hold; for :meth:`Cache.check`."""
        return [ids for lines in (self._unsaved, self._unwritten) for line in lines for ids in line]


def _split(pages: Ids, fit: NDArray[np.bool_], room: int) -> tuple[Ids, Ids]:
    """The first ``room`` pages that are ``fit``, and all the others, in order."""
    ready = fit & (np.cumsum(fit) <= room)
    return pages[ready], pages[~ready]


def _count(tickets: Iterable[Ticket], group: int) -> int:
    """Pages of a group that they move."""
    moves = (move for ticket in tickets for move in ticket.moves)
    return sum(len(move.pages) for move in moves if move.group == group)
