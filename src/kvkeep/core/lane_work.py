"""The work of lanes: copies between media and calls of the store. Lanes never see tables."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..media.base import Copy, Mark, Media
from ..schema import Ids, Key, Schema
from .lanes import J
from .speed import Speed
from .storage import Storage
from .ticket import LOAD, READ, Move, Ticket

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Inquiry:
    """A job that moves no bytes: a lookup or a touch."""

    ask: Callable[[Storage], None]  # lane's thread
    finish: Callable[[], None]  # scheduler's thread; also where the store failed

    def fail(self) -> None: ...

    def touched(self) -> list[Ids]:
        return []


class LaneWork:
    """The work of every lane. Each lane's thread calls its own method."""

    def __init__(
        self, schema: Schema, media: Media, storage: Storage, faults: Counter[str]
    ) -> None:
        self._groups = schema.groups
        self._media, self._storage, self._faults = media, storage, faults
        self.moved: Counter[str] = Counter()  # bytes that landed, by route
        self.seconds: dict[str, float] = {}  # at work, by lane
        self.speeds = {LOAD: Speed(), READ: Speed()}  # bytes

    def contained(self, name: str, work: Callable[[list[J]], None]) -> Callable[[list[J]], None]:
        """``work`` that never raises: an exception fails the batch and is counted."""
        self.seconds[name] = 0.0

        def run(batch: list[J]) -> None:
            began = time.monotonic()
            try:
                work(batch)
            except BaseException as error:
                pages = sum(map(len, chain(*(job.touched() for job in batch))))
                log.warning("%s failed, %d pages lost: %r", name, pages, error)
                self._faults[name] += 1
                for job in batch:
                    job.fail()
            finally:
                self.seconds[name] += time.monotonic() - began

        return run

    def save(self, batch: list[Ticket]) -> None:
        """Device to host."""
        self._media.save(_copies(batch), [ticket.after for ticket in batch])
        self._all_landed(batch)

    def load(self, batch: list[Ticket]) -> None:
        """Host to device, layer by layer."""

        def reached(layer: int, mark: Mark) -> None:
            for ticket in batch:
                ticket.arrival.reach(layer, mark)

        for ticket in batch:  # the device's earlier work is no part of the load's time
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
            self._land(ticket, np.ones(sum(map(len, ticket.touched())), dtype=bool))

    def write(self, batch: list[Ticket]) -> None:
        """Host to storage."""
        for ticket in batch:
            # Page by page across groups: a store that runs full then keeps whole pages.
            places = [np.arange(len(move.keys)) for move in ticket.moves]
            order = np.argsort(np.concatenate(places), kind="stable").tolist()
            each = (self._media.bodies(move.group, move.source) for move in ticket.moves)
            keys, bodies = _keys(ticket), list(chain(*each))
            flags = np.zeros(len(keys), dtype=bool)
            flags[order] = self._storage.write([keys[i] for i in order], [bodies[i] for i in order])
            self._land(ticket, flags)

    def read(self, batch: list[Ticket]) -> None:
        """Storage to host."""
        speed = self.speeds[READ]
        for ticket in batch:
            if ticket.abandoned:
                ticket.fail()
                continue
            bodies = [self._media.bodies(move.group, move.target) for move in ticket.moves]
            began = time.monotonic()
            with speed.under_way(ticket.left):
                flags = self._storage.read(_keys(ticket), list(chain(*bodies)))
            seconds = time.monotonic() - began
            for move, read in zip(ticket.moves, bodies, strict=True):
                self._media.keep(move.group, move.target, read)
            speed.observe(self._land(ticket, flags), seconds)  # last: nothing landed if that raised
            ticket.left = 0

    def ask(self, batch: list[Inquiry]) -> None:
        """Lookups and touches."""
        for inquiry in batch:
            inquiry.ask(self._storage)

    def _land(self, ticket: Ticket, flags: NDArray[np.bool_]) -> int:
        """Set each page's flag; returns the bytes that landed."""
        start, landed = 0, 0
        for move in ticket.moves:
            move.landed = flags[start : start + len(move.pages)]
            start += len(move.pages)
            size = self._groups[move.group].record_bytes
            landed += size * int(np.count_nonzero(move.landed))
        self.moved[ticket.route.name] += landed
        return landed


def _keys(ticket: Ticket) -> list[Key]:
    return [key for move in ticket.moves for key in move.keys]


def _copies(batch: list[Ticket]) -> list[Copy]:
    """One copy per group for all tickets."""
    merged: dict[int, list[Move]] = {}
    for ticket in batch:
        for move in ticket.moves:
            merged.setdefault(move.group, []).append(move)
    return [
        Copy(g, np.concatenate([m.source for m in ms]), np.concatenate([m.target for m in ms]))
        for g, ms in merged.items()
    ]
