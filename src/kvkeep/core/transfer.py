"""Lanes and tickets: when bytes move.

Five lanes, each a thread of its own: save (device to host), load (host to device), write (host to
storage), read (storage to host) and probe (what storage has, also while others read). The
scheduler's thread submits tickets and collects those that came back in :meth:`Transfers.landed`; a
lane's thread sees slot arrays and byte views only. No exception of a backend ends a lane. A store
that fails or stalls trips its circuit breaker.

A ticket owns its source and target slots until it came back, whatever happened meanwhile to the
request, the page or the deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..media.arrival import Arrival
from ..media.base import NOW, Copy, Mark, Media
from ..schema import Closed, Ids, Key, Schema, Slots
from ..stores.base import Store
from .breaker import Breaker
from .speed import Speed

log = logging.getLogger(__name__)

SAVE, LOAD, WRITE, READ, PROBE, TOUCH = "save", "load", "write", "read", "probe", "touch"

Verb = Callable[[Store, Sequence[Key], Sequence[memoryview]], list[bool] | None]
# Ancestors come last: a store keeps the newest, and what is below a gap is of no use.
_WRITE: Verb = lambda store, keys, bodies: store.write(keys[::-1], bodies[::-1])[::-1]  # noqa: E731
_READ: Verb = lambda store, keys, bodies: store.read(keys, bodies)  # noqa: E731
_PROBE: Verb = lambda store, keys, _: store.probe(keys)  # noqa: E731
_TOUCH: Verb = lambda store, keys, _: store.touch(keys)  # noqa: E731

_LANE_OF = {TOUCH: WRITE}
CALL_RECORDS = 256
"""Records in one call of a store."""
_READ_SECONDS = 0.1  # that one read should take at most, ...
_READ_SHARE = 1 / 4  # ... nor more of what is wanted, to see early when a store turns slow, ...
_READ_LEAST = 0.005  # ... but so many seconds at least, which are not worth several reads, ...
_READ_BYTES = 1 << 20  # ... and so much while nobody knows how long that takes


@dataclass(slots=True)
class Move:
    """Pages of one group under way."""

    group: int  # index in the schema
    pages: Ids  # page ids; meaningful to the cache only
    source: Slots  # slots; empty where the source is storage
    target: Slots  # slots; empty where the target is storage
    keys: list[Key] = field(default_factory=list)  # where one side is storage
    landed: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=bool))


@dataclass(slots=True, eq=False)
class Ticket:
    """One transfer of many pages of many groups. All or some of it lands, a flag per page."""

    kind: str
    moves: list[Move]
    waiters: list[Any] = field(default_factory=list)  # who to tell; the cache's own
    present: list[NDArray[np.bool_]] = field(default_factory=list)  # a probe's question and answer
    submitted: float = 0.0  # monotonic seconds
    left: int = 0  # bytes still to move; the lane's
    abandoned: bool = False  # nobody waits for it: if it has not begun, it is not made
    after: Mark = NOW  # what the device had been told by then
    arrival: Arrival = field(default_factory=Arrival)  # of a load

    def touches(self, pages: Ids) -> bool:
        """Whether it moves any of these pages."""
        return any(bool(np.isin(move.pages, pages).any()) for move in self.moves)


class Lane(Protocol):
    """Runs tickets in some order and reports each once. Calls are the scheduler's thread's."""

    def submit(self, ticket: Ticket) -> None: ...
    def withdraw(self) -> list[Ticket]:
        """Take back what has not begun."""
        ...

    def close(self, timeout: float) -> None: ...


Work = Callable[[list[Ticket]], None]
MakeLane = Callable[[str, Work, Callable[[Ticket], None]], Lane]
"""``make(name, work, report)``: ``work`` moves a batch of tickets and never raises."""


class ThreadLane:
    """A lane on a thread of its own. One ``work`` call gets everything that is queued, or from
    storage one ticket: who came first is not to wait for all who came meanwhile."""

    def __init__(self, name: str, work: Work, report: Callable[[Ticket], None]) -> None:
        self._work, self._report = work, report
        self._merges = name in (SAVE, LOAD)
        self._queue: deque[Ticket] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvkeep-{name}", daemon=True)
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        with self._wake:
            if self._closed:
                raise Closed("the transfer lanes are closed")
            self._queue.append(ticket)
            self._wake.notify()

    def withdraw(self) -> list[Ticket]:
        with self._wake:
            taken = list(self._queue)
            self._queue.clear()
            return taken

    def close(self, timeout: float) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                count = len(self._queue) if self._merges else 1
                batch = [self._queue.popleft() for _ in range(count)]
            self._work(batch)
            for ticket in batch:
                self._report(ticket)


class Transfers:
    """The lanes between two media and a store.

    Args:
        schema: what the groups are.
        media: device and host bytes.
        store: the storage tier, or None for none.
        lane: makes a lane; tests give one that they step by hand.
        stall_seconds: a storage call that takes longer trips the breaker.
    """

    def __init__(
        self,
        schema: Schema,
        media: Media,
        store: Store | None,
        lane: MakeLane = ThreadLane,
        stall_seconds: float = 10.0,
    ) -> None:
        self.schema = schema
        self._prints = [schema.fingerprint(group) for group in schema.groups]
        self._media, self._store = media, store
        self._stall = stall_seconds
        self._done: deque[Ticket] = deque()
        self._calling: dict[str, float] = {}  # when the storage call under way began, by kind
        self.breaker = Breaker()
        self.faults: Counter[str] = Counter()  # contained failures, by lane
        self.moved: Counter[str] = Counter()  # bytes that landed, by lane
        self.speeds = {LOAD: Speed(), READ: Speed()}  # in bytes; their lanes measure
        self.pending: list[Ticket] = []  # submitted and not collected; the scheduler's thread
        self._tell: Callable[[], None] = lambda: None
        report = self._report
        self._lanes = {
            SAVE: lane(SAVE, self._each(self._save), report),
            LOAD: lane(LOAD, self._each(self._load), report),
            WRITE: lane(WRITE, self._each(self._write), report),
            READ: lane(READ, self._each(self._read), report),
            PROBE: lane(PROBE, self._each(self._probe), report),
        }

    @property
    def has_store(self) -> bool:
        """There is a store, in order or not."""
        return self._store is not None

    @property
    def storage(self) -> bool:
        """There is a store, and its breaker is closed."""
        return self.has_store and not self.breaker.open

    def listen(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called, on any thread, whenever a ticket came back: see `landed`."""
        self._tell = callback

    def _report(self, ticket: Ticket) -> None:
        self._done.append(ticket)
        try:
            self._tell()
        except Exception:  # not ours, and no reason to end a lane
            log.exception("who listens to transfers failed")

    def submit(self, ticket: Ticket) -> Ticket:
        """Start a transfer. Storage that is out of order fails at once, in the next `landed`."""
        ticket.submitted = time.monotonic()
        groups = self.schema.groups
        ticket.left = sum(len(m.pages) * groups[m.group].record_bytes for m in ticket.moves)
        self.pending.append(ticket)
        kind = ticket.kind
        if kind in self.speeds:
            self.speeds[kind].tried()
        if kind in (SAVE, LOAD):
            ticket.after = self._media.mark()
        elif not self.storage:
            self._report(_failed(ticket))
            return ticket
        self._lanes[_LANE_OF.get(kind, kind)].submit(ticket)
        return ticket

    def landed(self, kind: str = "") -> Iterator[Ticket]:
        """Tickets that came back since the last call, each with a flag per page. Each is pending
        until it is taken from here.

        ``kind``: only tickets of this kind; others wait for the next call."""
        self._watch()
        for _ in range(len(self._done)):
            if not self._done:
                return  # whoever took the last one asked for more
            ticket = self._done.popleft()
            if kind in ("", ticket.kind):
                self.pending.remove(ticket)
                yield ticket
            else:
                self._done.append(ticket)

    def names(self, group: int, pages: Iterable[bytes]) -> list[Key]:
        """What storage calls one group of the pages with these chained keys."""
        mine = self._prints[group]
        return [Key(mine, page) for page in pages]

    def seconds(self, kind: str, size: int = 0, last: Ticket | None = None) -> float | None:
        """How long ``size`` more bytes take behind all that waits on a lane, or behind ``last``
        alone and what is before it; None: not known yet."""
        for ticket in self.pending:
            if ticket.kind == kind and not ticket.abandoned:
                size += ticket.left
            if ticket is last:
                break
        return self.speeds[kind].seconds(size)

    def close(self, timeout: float = 5.0) -> bool:
        """Stop the lanes; what is queued is still carried out, if it takes no longer.

        False: a storage call hangs, so the store must not be closed under it."""
        for lane in self._lanes.values():
            lane.close(timeout)
        return not self._calling

    def _watch(self) -> None:
        """Trip the breaker for a storage call that hangs, and free who queues behind it."""
        now = time.monotonic()
        for kind, since in list(self._calling.items()):
            if now - since > self._stall:
                if not self.breaker.open:
                    self.faults["stall"] += 1
                self.breaker.failure(trip=True)
                self._done.extend(map(_failed, self._lanes[_LANE_OF.get(kind, kind)].withdraw()))

    def _each(self, work: Work) -> Work:
        """A lane's whole work: no exception ends it, and what raised did not land."""

        def run(batch: list[Ticket]) -> None:
            try:
                work(batch)
            except Exception as error:
                log.warning("%s failed, %d pages lost: %r", batch[0].kind, _pages(batch), error)
                self.faults[batch[0].kind] += 1
                for ticket in batch:
                    _failed(ticket)

        return run

    def _save(self, batch: list[Ticket]) -> None:
        self._media.save(_copies(batch), [ticket.after for ticket in batch])
        self._all_landed(batch)

    def _load(self, batch: list[Ticket]) -> None:
        def reached(layer: int, mark: Mark) -> None:
            for ticket in batch:
                ticket.arrival.reach(layer, mark)

        for ticket in batch:  # what the device does before is no part of how fast this goes
            ticket.after.synchronize()
        size, began = sum(ticket.left for ticket in batch), time.monotonic()
        with self.speeds[LOAD].under_way(size):
            self._media.load(_copies(batch), [ticket.after for ticket in batch], reached)
        self.speeds[LOAD].observe(size, time.monotonic() - began)
        self._all_landed(batch)
        for ticket in batch:
            ticket.arrival.land()

    def _all_landed(self, batch: list[Ticket]) -> None:
        for ticket in batch:
            self._land(ticket, np.ones(_pages([ticket]), dtype=bool))

    def _write(self, batch: list[Ticket]) -> None:
        for ticket in batch:
            # Page by page, with all groups: a store that runs full keeps pages, and not a group.
            places = [np.arange(len(move.keys)) for move in ticket.moves]
            order = np.argsort(np.concatenate(places), kind="stable").tolist()
            keys = _keys(ticket)
            keys = [keys[i] for i in order]
            if ticket.kind == TOUCH:
                self._call(TOUCH, keys, _TOUCH)
            else:
                each = (self._media.bodies(move.group, move.source) for move in ticket.moves)
                bodies, flags = list(chain(*each)), np.zeros(len(keys), dtype=bool)
                flags[order] = self._call(WRITE, keys, _WRITE, [bodies[i] for i in order])
                self._land(ticket, flags)

    def _read(self, batch: list[Ticket]) -> None:
        speed = self.speeds[READ]
        for ticket in batch:
            if ticket.abandoned:
                _failed(ticket)
                continue
            bodies = [self._media.bodies(move.group, move.target) for move in ticket.moves]
            began = time.monotonic()
            with speed.under_way(ticket.left):
                flags = self._call(READ, _keys(ticket), _READ, list(chain(*bodies)))
            speed.observe(self._land(ticket, flags), time.monotonic() - began)
            ticket.left = 0
            for move, read in zip(ticket.moves, bodies, strict=True):
                self._media.keep(move.group, move.target, read)

    def read_bytes(self, total: int) -> float:
        """How many of ``total`` bytes one ticket should read."""
        pace = self.speeds[READ].seconds(1)
        if not pace:
            return _READ_BYTES
        return min(_READ_SECONDS / pace, max(_READ_SHARE * total, _READ_LEAST / pace))

    def _call(
        self,
        kind: str,
        keys: list[Key],
        verb: Verb,
        bodies: Sequence[memoryview] = (),
    ) -> NDArray[np.bool_]:
        """``verb(store, keys, bodies)``, in calls of bounded size, under the breaker.

        Returns a flag per key; what the breaker refused or what raised is False."""
        store, flags = self._store, np.zeros(len(keys), dtype=bool)
        if store is None:
            return flags
        for start in range(0, len(keys), CALL_RECORDS):
            if self.breaker.open:
                break
            part = slice(start, start + CALL_RECORDS)
            self._calling[kind] = time.monotonic()
            try:
                answer = verb(store, keys[part], bodies[part])
                self.breaker.success()
                if answer is not None:
                    flags[part] = answer
            except Exception as error:
                log.warning("storage %s failed: %r", kind, error)
                self.faults[kind] += 1
                self.breaker.failure()
            finally:
                self._calling.pop(kind, None)
        return flags

    def _land(self, ticket: Ticket, flags: NDArray[np.bool_]) -> int:
        """Give each page its flag; the bytes that landed."""
        start, landed = 0, 0
        for move in ticket.moves:
            move.landed = flags[start : start + len(move.pages)]
            start += len(move.pages)
            size = self.schema.groups[move.group].record_bytes
            landed += size * int(np.count_nonzero(move.landed))
        self.moved[ticket.kind] += landed
        return landed

    def _probe(self, batch: list[Ticket]) -> None:
        for ticket in batch:
            self._ask(ticket)

    def _ask(self, ticket: Ticket) -> None:
        """Fill ``ticket.present``: groups that need every page as far as each required one goes,
        then the others as far as those reach. What is present already is not asked for."""
        groups, present = self.schema.groups, ticket.present
        whole = [g for g, group in enumerate(groups) if group.tail is None]
        bounds = [present[g] for g in whole if groups[g].required]
        reach = len(present[0])
        for start in range(0, reach if whole else 0, CALL_RECORDS):
            part = slice(start, min(start + CALL_RECORDS, reach))
            self._complete(ticket, whole, part)
            if not all(has[part].all() for has in bounds):
                break
        reach = min([reach, *(int(has.argmin()) for has in bounds if not has.all())])
        self._complete(ticket, [g for g in range(len(groups)) if g not in whole], slice(0, reach))

    def _complete(self, ticket: Ticket, groups: Sequence[int], pages: slice) -> None:
        """Ask for what these groups lack of some pages."""
        lacking = [pages.start + np.flatnonzero(~ticket.present[g][pages]) for g in groups]
        both = list(zip(groups, lacking, strict=True))
        keys = [ticket.moves[g].keys[i] for g, at in both for i in at.tolist()]
        flags = self._call(PROBE, keys, _PROBE)
        for g, at in both:
            ticket.present[g][at], flags = flags[: len(at)], flags[len(at) :]


def _keys(ticket: Ticket) -> list[Key]:
    return [key for move in ticket.moves for key in move.keys]


def _pages(batch: list[Ticket]) -> int:
    return sum(len(move.pages) for ticket in batch for move in ticket.moves)


def _copies(batch: list[Ticket]) -> list[Copy]:
    """All moves of all tickets as one copy per group."""
    merged: dict[int, list[Move]] = {}
    for ticket in batch:
        for move in ticket.moves:
            merged.setdefault(move.group, []).append(move)
    return [
        Copy(g, np.concatenate([m.source for m in ms]), np.concatenate([m.target for m in ms]))
        for g, ms in merged.items()
    ]


def _failed(ticket: Ticket) -> Ticket:
    """Mark everything that has not landed as lost."""
    ticket.arrival.fail()
    for move in ticket.moves:
        if len(move.landed) != len(move.pages):
            move.landed = np.zeros(len(move.pages), dtype=bool)
    return ticket
