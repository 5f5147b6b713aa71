"""Tickets: which bytes move, by which route, and which of them landed.

===== ======= =======
route reads   fills
===== ======= =======
save  device  host
load  host    device
write host    storage
read  storage host
===== ======= =======

This table is stated once, as :data:`ROUTES`. Whoever pins, fills, counts or repairs goes by it.
"""

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
    """One way that bytes go, and the lane that moves them."""

    name: str
    source: int | None  # the memory tier whose slots it reads; None: storage
    target: int | None  # the memory tier whose slots it fills; None: storage

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
    """Work of a lane. A lane carries it out or fails it; then the scheduler's thread ends it."""

    def fail(self) -> None:
        """Nothing more of it will be done. Any thread."""

    def finish(self) -> None:
        """Its outcome takes effect. The scheduler's thread."""

    def touched(self) -> list[Ids]:
        """Page ids that its outcome concerns."""
        ...


@dataclass(slots=True)
class Move:
    """Pages of one group on one route. Storage names them by keys, a memory tier by slots."""

    group: int  # index in the schema
    pages: Ids
    keys: list[Key] = field(default_factory=list)  # in storage, if the route goes there
    source: Slots = field(default_factory=lambda: NO_SLOTS)  # filled in at departure
    target: Slots = field(default_factory=lambda: NO_SLOTS)  # filled in at departure
    landed: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @property
    def arrived(self) -> Ids:
        """Pages whose bytes landed."""
        return self.pages[self.landed]

    @property
    def lost(self) -> Ids:
        """Pages whose bytes did not land."""
        return self.pages[~self.landed]


@dataclass(slots=True, eq=False)
class Ticket:
    """One transfer of many pages of many groups. Each page lands or is lost by itself."""

    route: Route
    moves: list[Move]
    then: Callable[[Ticket], None]  # applies the outcome
    left: int = 0  # bytes still to move; its lane writes it
    submitted: float = 0.0  # monotonic seconds
    abandoned: bool = False  # no request waits for it: if it has not begun, its lane skips it
    after: Mark = NOW  # the device commands that come first
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
        """Pages of a group that it moves."""
        return sum(len(move.pages) for move in self.moves if move.group == group)
