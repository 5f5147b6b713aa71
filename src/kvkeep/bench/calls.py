"""What an engine calls, whole: admit, commit and release of a cache, beside the same of SGLang's.

Beside the tree and table this is pins, holds, stamps and a lease here; matching again, locks and
slot indices there. Nothing moves: there is room, no host tier and no storage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from ..core.cache import Cache
from ..core.lease import Lease
from ..schema import Component, Group, Identity, InvariantError, Schema
from .load import Load
from .measure import Note, Row, Samples, Step, Tell, uncollected
from .tree import CHUNK, FOUR, GENERATED, ONE


class Calls(Protocol):
    """A cache under an engine. Each call prepares a step, off the clock."""

    def hit(self, i: int) -> Step:
        """Admit sequence ``i``, of which all is cached, learn its slots, and release it."""

    def begin(self, i: int) -> int:
        """Admit sequence ``i`` to be computed; tokens of it that are cached."""

    def commit(self, stop: int) -> Step:
        """The sequence that was begun is computed up to token ``stop``."""

    def end(self) -> None:
        """Release the sequence that was begun."""

    def close(self) -> None:
        """Stop what runs."""


Make = Callable[[Load], Calls]


class Ours:
    """:class:`~kvkeep.core.cache.Cache`.

    Args:
        groups: of state; a hit needs every page of each.
    """

    def __init__(self, load: Load, groups: int = 1) -> None:
        part = Component("kv", (0,), (1,), "U8")
        self._groups = [f"group{g}" for g in range(groups)]
        kinds = tuple(Group(name, (part,)) for name in self._groups)
        schema = Schema(Identity("bench"), load.page_tokens, kinds)
        self._cache = Cache(schema, [load.pages] * groups, [0] * groups)
        self._load, self._tokens = load, load.tokens[0]
        self._lease: Lease

    def hit(self, i: int) -> Step:
        cache, tokens = self._cache, self._load.tokens[i]

        def step() -> None:
            lease = self._admitted(cache.admit(tokens))
            for name in self._groups:
                lease.slots(name)
            cache.release(lease)

        return step

    def begin(self, i: int) -> int:
        self._tokens = self._load.tokens[i]
        self._lease = self._admitted(self._cache.admit(self._tokens))
        return self._lease.pages * self._load.page_tokens

    def commit(self, stop: int) -> Step:
        if not self._cache.grow(self._lease, stop):
            raise InvariantError("the tier holds all of the load, and yet it is full")
        return partial(self._cache.commit, self._lease, self._tokens[:stop])

    def end(self) -> None:
        self._cache.release(self._lease)

    def close(self) -> None:
        self._cache.close()

    def _admitted(self, lease: Lease | None) -> Lease:
        if lease is None:
            raise InvariantError("the tier holds all of the load, and yet it is full")
        return lease


def measure(load: Load, peers: dict[str, Make], repeats: int, tell: Tell) -> list[Row]:
    """A row per call and peer. Sides take turns, ``repeats`` times."""
    samples = Samples()
    sides: list[tuple[str, Make]] = [(ONE, Ours), (FOUR, partial(Ours, groups=4)), *peers.items()]
    for turn in range(repeats):
        sides = sides[1:] + sides[:1]
        for name, make in sides:
            tell(f"calls, turn {turn + 1} of {repeats}: {name}")
            with uncollected():
                _serve(make(load), load, partial(samples.time, name))
    label = f"{load.length // 1024}k/{load.page_tokens}"
    four = samples.rows(f"{label} calls, 4 groups:", FOUR, [ONE])
    return samples.rows(f"{label} calls:", ONE, list(peers)) + four


def _serve(side: Calls, load: Load, note: Note) -> None:
    """Every sequence once, by chunks and single pages, and then again."""
    prompt = load.length - GENERATED * load.page_tokens
    for i in range(load.sequences):
        done = side.begin(i)
        while done < load.length:
            what, size = ("a chunk", CHUNK) if done < prompt else ("a page", load.page_tokens)
            done = min(done + size, prompt if done < prompt else load.length)
            note(f"commit {what}", side.commit(done))
        side.end()
    for i in np.random.default_rng(0).permutation(load.sequences).tolist():
        note("admit and release", side.hit(i))
    side.close()
