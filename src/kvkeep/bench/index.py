"""Tree, table and tier under test: ours, behind what peers can do as well."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..core.pages import DEVICE, LIVE, count
from ..core.policy import lru
from ..core.residency import Residency
from ..schema import (
    NO_IDS,
    Component,
    Group,
    Identity,
    InvariantError,
    Residence,
    Schema,
    Slots,
    root_key,
)
from .load import Load
from .measure import Step

_ROOT = root_key("")


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
    """Residency: the tree, the table and a device tier. There is no storage, so no keys.

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
        self._load, self._groups = load, tuple(range(groups))
        self._paths = [NO_IDS] * load.sequences

    def begin(self, i: int) -> int:
        raw = self._load.tokens[i].tobytes()
        self._paths[i] = self._residency.tree.match(_ROOT, raw)
        return len(self._paths[i]) * self._load.page_tokens

    def extend(self, i: int, stop: int) -> Step:
        residency, size = self._residency, self._load.page_tokens
        table, device, groups = residency.table, residency.device, self._groups
        path = self._paths[i]
        raw = self._load.tokens[i, len(path) * size : stop].tobytes()
        slots = self._reserve(stop // size - len(path))

        def step() -> None:
            self._paths[i] = whole = residency.extend(_ROOT, path, raw)
            residency.stamp(whole)
            new = whole[len(path) :]
            state = table.state[DEVICE].take(new, axis=1)
            if count(state):
                known = state[0] == LIVE  # the same in all groups
                device.free(groups, slots[:, known])
                device.adopt(groups, new[~known], slots[:, ~known], Residence.LIVE)
            else:
                device.adopt(groups, new, slots, Residence.LIVE)

        return step

    def _reserve(self, pages: int) -> Slots:
        residency, device = self._residency, self._residency.device
        for g in self._groups:
            residency.make_room(device, g, pages)
        slots = device.reserve(self._groups, pages)
        if slots is None:
            raise InvariantError("the tier holds all of the load, and yet it is full")
        return slots

    def match(self, i: int) -> Step:
        tree, raw = self._residency.tree, self._load.tokens[i].tobytes()
        return lambda: tree.match(_ROOT, raw)

    def match_list(self, i: int) -> Step:
        tree, tokens = self._residency.tree, self._load.tokens[i].tolist()
        return lambda: tree.match(_ROOT, np.array(tokens, dtype=np.int32).tobytes())

    def slots(self, i: int) -> Step:
        tree, slot = self._residency.tree, self._residency.table.slot
        raw = self._load.tokens[i].tobytes()

        def step() -> None:
            ids = tree.match(_ROOT, raw)
            for g in self._groups:
                slot[DEVICE, g][ids]

        return step

    def evict(self, pages: int) -> Step:
        residency = self._residency
        return lambda: residency.evict(residency.device, 0, pages)

    def resident(self) -> int:
        return len(self._residency.table)
