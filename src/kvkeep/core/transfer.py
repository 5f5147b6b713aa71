"""Transfers: submit jobs to the lanes and collect them; compare moving state with recomputing it.

Five lanes, each with its own thread: one per route of :mod:`~kvkeep.core.ticket`, and "ask" for
lookups and touches. The scheduler's thread submits jobs and collects finished ones in
:meth:`Transfers.landed`. No exception of a backend ends a lane.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from ..media.base import Media
from ..schema import Schema
from ..stores.base import Store
from .lane_work import Inquiry, LaneWork
from .lanes import Inbox, J, Lane, Listener, MakeLane, ThreadLane
from .policy import Policy
from .speed import Speed
from .storage import Storage
from .ticket import LOAD, READ, SAVE, WRITE, Job, Route, Ticket

ASK = "ask"  # the lane of lookups and touches

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
        self.groups, self._media = schema.groups, media
        self.faults: Counter[str] = Counter()  # contained failures, by lane or verb
        self.storage = Storage(schema, store, stall_seconds, self.faults)
        work = LaneWork(schema, media, self.storage, self.faults)
        self.moved, self.seconds_at_work, self.speeds = work.moved, work.seconds, work.speeds
        self.tickets: list[Ticket] = []  # submitted and not collected, in order
        self._asked: list[Inquiry] = []  # the same of inquiries
        self._listener = Listener()
        self._landed: Inbox[Ticket] = Inbox(self._listener)
        self._answered: Inbox[Inquiry] = Inbox(self._listener)
        works = {SAVE: work.save, LOAD: work.load, WRITE: work.write, READ: work.read}
        self._moving: dict[Route, Lane[Ticket]] = {
            route: lane(route.name, work.contained(route.name, does), self._landed.put)
            for route, does in works.items()
        }
        self._asking: Lane[Inquiry] = lane(ASK, work.contained(ASK, work.ask), self._answered.put)
        self.closers = (*(lane.close for lane in self._moving.values()), self._asking.close)
        asking = partial(_give_up, self._asking, self._answered)
        self._fail_behind: dict[str, Callable[[], None]] = {
            "probe": asking,
            "touch": asking,
            "read": partial(_give_up, self._moving[READ], self._landed),
            "write": partial(_give_up, self._moving[WRITE], self._landed),
        }  # by verb of the store: fail the jobs that wait behind its call

    @property
    def idle(self) -> bool:
        """No job is in flight."""
        return not self.tickets and not self._asked

    @property
    def inquiries(self) -> int:
        """Inquiries that were submitted and not collected."""
        return len(self._asked)

    def listen(self, callback: Callable[[], None]) -> None:
        """Call ``callback``, on any thread, whenever a job is done: see :meth:`landed`."""
        self._listener.callback = callback

    def submit(self, ticket: Ticket) -> None:
        """Start a transfer. While the breaker is open, reads and writes fail at once."""
        route = ticket.route
        ticket.submitted = time.monotonic()
        ticket.left = sum(
            len(move.pages) * self.groups[move.group].record_bytes for move in ticket.moves
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
        self._asked.append(inquiry)
        if self.storage.usable:
            self._asking.submit(inquiry)
        else:
            inquiry.fail()
            self._answered.put(inquiry)

    def landed(self) -> Iterator[Job]:
        """Collect finished jobs; each stays in flight until it is yielded.

        An inquiry whose end was interrupted comes again. A ticket does not: the audit mends what it
        left half done."""
        for verb in self.storage.hung():
            self._fail_behind[verb]()
        for ticket in self._landed.taken():
            if ticket in self.tickets:
                self.tickets.remove(ticket)
                yield ticket
        for inquiry in self._answered.taken():
            if inquiry in self._asked:
                yield inquiry
                self._asked.remove(inquiry)

    def on(self, route: Route) -> list[Ticket]:
        """Tickets of a route, in order."""
        return [ticket for ticket in self.tickets if ticket.route is route]

    def behind(self, route: Route) -> dict[Ticket, int]:
        """Tickets of a route in order, each with the bytes that move until it is done."""
        tickets = self.on(route)
        sizes = accumulate(0 if ticket.abandoned else ticket.left for ticket in tickets)
        return dict(zip(tickets, sizes, strict=True))

    def seconds(self, route: Route, size: int) -> float | None:
        """Seconds that ``size`` more bytes take behind all tickets of a route; None: not measured
        yet."""
        return self.speeds[route].seconds(size + max(self.behind(route).values(), default=0))

    def read_bytes(self, total: int) -> float:
        """Bytes that one ticket should read of ``total``."""
        pace = self.speeds[READ].seconds(1)
        if not pace:
            return _READ_BYTES
        return min(_READ_SECONDS / pace, max(_READ_SHARE * total, _READ_LEAST / pace))

    def close(self, timeout: float = 5.0) -> bool:
        """Carry out what is queued and stop the lanes. Any thread; idempotent.

        False: a lane is still at work, so the store must not be closed under it."""
        return close_all(self.closers, timeout)


class Recompute:
    """State that is slower to load than to recompute is recomputed. Compares measured speeds; until
    both are known, state is loaded."""

    def __init__(self, transfers: Transfers, policy: Policy) -> None:
        self._transfers, self._policy = transfers, policy
        self.prefill = Speed()  # tokens

    @property
    def possible(self) -> bool:
        """The policy allows it and prefill has been measured."""
        return self._policy.recompute == "auto" and self.prefill.seconds(1) is not None

    def beats(self, seconds: float | None, tokens: int) -> bool:
        """Whether computing ``tokens`` takes less than ``seconds``; False if either is unknown."""
        computing = self.prefill.seconds(tokens) if self._policy.recompute == "auto" else None
        return seconds is not None and computing is not None and computing < seconds

    def beats_moving(self, route: Route, pages: Sequence[int], tokens: int) -> bool:
        """Whether computing is faster than moving ``pages`` by group behind a route's tickets."""
        each = zip(pages, self._transfers.groups, strict=True)
        size = sum(count * group.record_bytes for count, group in each)
        return self.beats(self._transfers.seconds(route, size), tokens)


def close_all(closers: Sequence[Callable[[float], bool]], timeout: float) -> bool:
    """Call every lane's ``close``, with ``timeout`` seconds for all; whether all have ended."""
    end = time.monotonic() + timeout
    closed = [close(max(0.0, end - time.monotonic())) for close in closers]
    return all(closed)


def _give_up(lane: Lane[J], inbox: Inbox[J]) -> None:
    """Fail the jobs that a lane has not begun."""
    for job in lane.withdraw():
        job.fail()
        inbox.put(job)
