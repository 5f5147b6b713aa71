"""Tickets: which pages move on which of four routes, and which of them landed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..media.arrival import Arrival
from ..media.base import NOW, Mark
from ..schema import NO_SLOTS, Ids, Key, Slots
from .pages import DEVICE, HOST


class Route(NamedTuple):
    """A direction in which bytes move, with a lane of its own."""

    name: str
    source: int | None  # memory tier that it reads; None: storage
    target: int | None  # memory tier that it fills; None: storage

    @property
    def stores(self) -> bool:
        """One end is storage."""
        return self.source is None or self.target is None


SAVE = Route("save", DEVICE, HOST)
LOAD = Route("load", HOST, DEVICE)
WRITE = Route("write", HOST, None)
READ = Route("read", None, HOST)
ROUTES = (SAVE, LOAD, WRITE, READ)


class Job(Protocol):
    """Work for a lane, which runs it or fails it; then the scheduler's thread finishes it."""

    def fail(self) -> None:
        """Mark what is not done yet as failed. Any thread."""

    def finish(self) -> None:
        """Apply its outcome. Scheduler's thread."""

    def touched(self) -> list[Ids]:
        """Page ids that its outcome affects."""
        ...


@dataclass(slots=True)
class Move:
    """Pages of one group on one route: keys in storage, slots in a memory tier."""

    group: int  # index in the schema
    pages: Ids
    keys: list[Key] = field(default_factory=list)  # if one end is storage
    source: Slots = field(default_factory=lambda: NO_SLOTS)  # filled in at departure
    target: Slots = field(default_factory=lambda: NO_SLOTS)  # filled in at departure
    landed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @property
    def arrived(self) -> Ids:
        return self.pages[self.landed]

    @property
    def lost(self) -> Ids:
        return self.pages[~self.landed]


@dataclass(slots=True, eq=False)
class Ticket:
    """One transfer of pages of many groups. Each page lands or is lost by itself."""

    route: Route
    moves: list[Move]
    then: Callable[[Ticket], None]  # applies the outcome; scheduler's thread
    left: int = 0  # bytes still to move; its lane updates it
    submitted: float = 0.0  # monotonic seconds
    abandoned: bool = False  # no request waits for it: its lane may skip it
    after: Mark = NOW  # device commands to wait for
    arrival: Arrival = field(default_factory=Arrival)  # of a load

    def fail(self) -> None:
        self.arrival.fail()
        for move in self.moves:
            if len(move.landed) != len(move.pages):
                move.landed = np.zeros(len(move.pages), dtype=bool)

    def finish(self) -> None:
        self.then(self)

    def touched(self) -> list[Ids]:
        return [move.pages for move in self.moves]

    def overlaps(self, pages: Ids) -> bool:
        """Whether it moves any of these pages."""
        return any(bool(np.isin(move.pages, pages).any()) for move in self.moves)

    def count(self, group: int) -> int:
        return sum(len(move.pages) for move in self.moves if move.group == group)
