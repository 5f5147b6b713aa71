"""Transfers: submit jobs to the lanes and collect them.

Five lanes, each with its own thread: one per route of :mod:`~kvkeep.core.ticket`, and "ask" for
lookups and touches. The scheduler's thread submits jobs and collects finished ones in
:meth:`Transfers.landed`. No exception of a backend ends a lane.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from ..media.base import Media
from ..schema import Schema
from ..stores.base import Store
from .lane_work import Inquiry, LaneWork
from .lanes import Inbox, J, Lane, Listener, MakeLane, ThreadLane
from .storage import Storage
from .ticket import LOAD, READ, SAVE, WRITE, Job, Route, Ticket

ASK = "ask"
"""The lane of lookups and touches."""

_READ_SECONDS = 0.1  # most for one read ...
_READ_SHARE = 1 / 4  # ... and at most this part of all, so that a slow store shows early ...
_READ_LEAST = 0.005  # ... but at least this, or calls cost more than bytes
_READ_BYTES = 1 << 20  # of one read while speed is unknown


class Transfers:
    """The lanes between media and store. Scheduler's thread only, except :meth:`close`.

    A storage call that takes longer than ``stall_seconds`` trips the breaker."""

    def __init__(
        self,
        schema: Schema,
        media: Media,
        store: Store | None,
        lane: MakeLane = ThreadLane,
        stall_seconds: float = 10.0,
    ) -> None:
        self._groups, self._media = schema.groups, media
        self.faults: Counter[str] = Counter()  # contained failures, by lane or verb
        self.storage = Storage(schema, store, stall_seconds, self.faults)
        work = LaneWork(schema, media, self.storage, self.faults)
        self.moved, self.speeds = work.moved, work.speeds
        self.tickets: list[Ticket] = []  # submitted and not collected, in order
        self.inquiries = 0  # submitted and not collected
        self._listener = Listener()
        self._landed: Inbox[Ticket] = Inbox(self._listener)
        self._answered: Inbox[Inquiry] = Inbox(self._listener)
        works = {SAVE: work.save, LOAD: work.load, WRITE: work.write, READ: work.read}
        self._moving: dict[Route, Lane[Ticket]] = {
            route: lane(route.name, work.contained(route.name, does), self._landed.put)
            for route, does in works.items()
        }
        self._asking: Lane[Inquiry] = lane(ASK, work.contained(ASK, work.ask), self._answered.put)
        asking = partial(_give_up, self._asking, self._answered)
        self._behind: dict[str, Callable[[], None]] = {
            "probe": asking,
            "touch": asking,
            "read": partial(_give_up, self._moving[READ], self._landed),
            "write": partial(_give_up, self._moving[WRITE], self._landed),
        }  # by verb of the store: fail the jobs that wait behind its call

    @property
    def idle(self) -> bool:
        """No job is in flight."""
        return not self.tickets and not self.inquiries

    def listen(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on any thread, whenever a job is done: see :meth:`landed`."""
        self._listener.callback = callback

    def submit(self, ticket: Ticket) -> None:
        """Start a transfer. While the breaker is open, reads and writes fail at once."""
        route = ticket.route
        ticket.submitted = time.monotonic()
        ticket.left = sum(
            len(move.pages) * self._groups[move.group].record_bytes for move in ticket.moves
        )
        self.tickets.append(ticket)
        if route in self.speeds:
            self.speeds[route].tried()
        if not route.stores:
            ticket.after = self._media.mark()
        elif not self.storage.usable:
            ticket.fail()
            self._landed.put(ticket)
            return
        self._moving[route].submit(ticket)

    def ask(self, inquiry: Inquiry) -> None:
        """Start an inquiry. While the breaker is open, it fails at once."""
        self.inquiries += 1
        if self.storage.usable:
            self._asking.submit(inquiry)
        else:
            inquiry.fail()
            self._answered.put(inquiry)

    def landed(self) -> Iterator[Job]:
        """Collect finished jobs; each stays in flight until it is yielded."""
        for verb in self.storage.hung():
            self._behind[verb]()
        for ticket in self._landed.taken():
            self.tickets.remove(ticket)
            yield ticket
        for inquiry in self._answered.taken():
            self.inquiries -= 1
            yield inquiry

    def seconds(self, route: Route, size: int = 0, last: Ticket | None = None) -> float | None:
        """Seconds that ``size`` more bytes take behind a route's tickets, or behind those up to
        ``last``; None: not measured yet."""
        for ticket in self.tickets:
            if ticket.route is route and not ticket.abandoned:
                size += ticket.left
            if ticket is last:
                break
        return self.speeds[route].seconds(size)

    def read_bytes(self, total: int) -> float:
        """Bytes that one ticket should read of ``total``."""
        pace = self.speeds[READ].seconds(1)
        if not pace:
            return _READ_BYTES
        return min(_READ_SECONDS / pace, max(_READ_SHARE * total, _READ_LEAST / pace))

    def close(self, timeout: float = 5.0) -> bool:
        """Finish all queues and stop the lanes. Any thread; idempotent. False: a call of the store
        hangs, so the caller must not close the store."""
        end = time.monotonic() + timeout
        for close in (*(lane.close for lane in self._moving.values()), self._asking.close):
            close(max(0.0, end - time.monotonic()))
        return not self.storage.calling


def _give_up(lane: Lane[J], inbox: Inbox[J]) -> None:
    """Fail the jobs that a lane has not begun."""
    for job in lane.withdraw():
        job.fail()
        inbox.put(job)
