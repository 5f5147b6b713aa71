"""Tree, table and tier under test: ours, behind what peers can do as well."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..pages import DEVICE
from ..policy import lru
from ..residency import Residency
from ..schema import (
    Component,
    Group,
    Identity,
    InvariantError,
    Residence,
    Schema,
    chain_keys,
    root_key,
)
from .load import Load
from .measure import Step

Slots = NDArray[np.int32]


class Index(Protocol):
    """A cache's index of one load's sequences. Each call prepares a step, off the clock."""

    def begin(self, i: int) -> int:
        """Sequence ``i`` arrives; tokens of it that are cached."""

    def extend(self, i: int, stop: int) -> Step:
        """Sequence ``i`` has been computed up to token ``stop``: index it up to there."""

    def match(self, i: int) -> Step:
        """Find the whole of sequence ``i``."""

    def match_list(self, i: int) -> Step:
        """The same, from a list of ints, as a tokenizer gives it."""

    def slots(self, i: int) -> Step:
        """As ``match``, and where each page's state lies."""

    def evict(self, pages: int) -> Step:
        """Let go of at least so many pages, and free all they had."""

    def resident(self) -> int:
        """Pages."""


class Ours:
    """Residency: the tree, the table and a device tier, with chained keys made beforehand.

    Args:
        groups: of state, each with slots of its own.
        slots: of each; None: enough for all of the load.
    """

    def __init__(self, load: Load, groups: int = 1, slots: int | None = None) -> None:
        part = Component("kv", (0,), (1,), "U8")
        kinds = tuple(Group(f"group{g}", (part,)) for g in range(groups))
        schema = Schema(Identity("bench"), load.page_tokens, kinds)
        room = [load.pages if slots is None else slots] * groups
        self._residency = Residency(schema, room, [0] * groups, lru)
        self._load, self._groups = load, range(groups)
        self._paths = [np.empty(0, dtype=np.int32)] * load.sequences

    def begin(self, i: int) -> int:
        raw = self._load.tokens[i].tobytes()
        self._paths[i] = self._residency.tree.match("", raw)
        return len(self._paths[i]) * self._load.page_tokens

    def extend(self, i: int, stop: int) -> Step:
        residency, size = self._residency, self._load.page_tokens
        tree, table, device = residency.tree, residency.table, residency.device
        path = self._paths[i]
        run = self._load.tokens[i, len(path) * size : stop]
        raw = run.tobytes()
        parent = table.keys(path[-1:])[0] if len(path) else root_key("")
        keys = chain_keys(parent, run, size)
        slots = [self._reserve(g, len(keys)) for g in self._groups]

        def step() -> None:
            if len(path):
                known = tree.below(int(path[-1]), len(path) - 1, raw)
            else:
                known = tree.match("", raw)
            count = len(known)
            above = np.concatenate((path, known))
            fresh = residency.add("", above, raw[count * tree.page_bytes :], keys[count:])
            self._paths[i] = whole = np.concatenate((above, fresh))
            now = table.tick()
            for g in self._groups:
                table.used[g, whole] = now
                device.free(g, slots[g][:count])
                device.adopt(g, fresh, slots[g][count:], Residence.LIVE)

        return step

    def _reserve(self, group: int, count: int) -> Slots:
        slots = self._residency.reserve(self._residency.device, group, count)
        if slots is None:
            raise InvariantError("the tier holds all of the load, and yet it is full")
        return slots

    def match(self, i: int) -> Step:
        tree, raw = self._residency.tree, self._load.tokens[i].tobytes()
        return lambda: tree.match("", raw)

    def match_list(self, i: int) -> Step:
        tree, tokens = self._residency.tree, self._load.tokens[i].tolist()
        return lambda: tree.match("", np.array(tokens, dtype=np.int32).tobytes())

    def slots(self, i: int) -> Step:
        tree, slot = self._residency.tree, self._residency.table.slot
        raw = self._load.tokens[i].tobytes()

        def step() -> None:
            ids = tree.match("", raw)
            for g in self._groups:
                slot[DEVICE, g][ids]

        return step

    def evict(self, pages: int) -> Step:
        residency = self._residency
        return lambda: residency.evict(residency.device, 0, pages)

    def resident(self) -> int:
        return len(self._residency.table)
