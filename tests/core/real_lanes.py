"""Transfers on real threads over media that hold names of bytes, for tests of lanes and stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from schemas import TWO

from kvkeep.core.lane_work import Inquiry
from kvkeep.core.presence import HitRule, Presence
from kvkeep.core.storage import Lookup
from kvkeep.core.ticket import Job, Move, Route, Ticket
from kvkeep.core.transfer import Transfers
from kvkeep.schema import Key, Schema
from kvkeep.testing.fakes import DictStore, TruthMedia


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def nothing(*_: Job) -> None:
    """A ``then`` of tickets whose outcome the test reads itself."""


def until(happened: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for another thread, but not forever."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


class Gate(DictStore):
    """A store that counts its calls and lets them wait at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.calls: list[int] = []
        self.inside = 0

    def _works(self, count: int) -> list[bool]:
        self.calls.append(count)
        self.inside += 1
        assert self.open.wait(60)
        self.inside -= 1
        return super()._works(count)

    def touch(self, keys) -> None:
        self._works(len(keys))
        super().touch(keys)


class Bench:
    """Transfers on real threads over media that hold names of bytes."""

    def __init__(self, store=None, stall: float = 60.0, schema: Schema = TWO) -> None:
        self.media = TruthMedia([600, 600], [600, 600])
        self.store = DictStore() if store is None else store
        self.schema = schema
        self.transfers = Transfers(schema, self.media, self.store, stall_seconds=stall)
        self.back: list[Job] = []

    def landed(self, count: int) -> list:
        """The next ``count`` jobs to come back."""

        def enough() -> bool:
            self.back += self.transfers.landed()
            return len(self.back) >= count

        until(enough)
        taken, self.back = self.back[:count], self.back[count:]
        return taken

    def names(self, group: int, *pages: int) -> list[Key]:
        """Storage keys of these pages."""
        return self.transfers.storage.names(group, self.keys(*pages))

    def keys(self, *pages: int) -> list[bytes]:
        """Chained keys of these pages."""
        return [bytes([i % 251, i // 251]) * 16 for i in pages]

    def move(self, group: int, *slots: int) -> Move:
        """A move of pages whose slots have the same numbers as the pages."""
        return Move(group, ids(*slots), self.names(group, *slots), ids(*slots), ids(*slots))

    def submit(self, route: Route, *moves: Move) -> Ticket:
        ticket = Ticket(route, list(moves), nothing)
        self.transfers.submit(ticket)
        return ticket

    def lookup(self, *memory: list[bool]) -> Lookup:
        """A lookup of the first pages; by group, which of them memory has."""
        names = [self.names(g, *range(len(has))) for g, has in enumerate(memory)]
        rule = HitRule(self.schema.groups, strict=True)
        lookup = Lookup(names, Presence(rule, np.array(memory, bool)))
        self.transfers.ask(Inquiry(lookup.ask, nothing))
        return lookup

    def close(self) -> None:
        if isinstance(self.store, Gate):
            self.store.open.set()
        self.transfers.close()
