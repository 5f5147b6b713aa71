"""The store as lanes see it: bounded calls, contained failures, a circuit breaker, lookups."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..schema import Key, Schema
from ..stores.base import Store
from .presence import Mask, Presence

log = logging.getLogger(__name__)

CALL_RECORDS = 256  # most in one call of a store

Call = Callable[[Store, Sequence[Key], Sequence[memoryview]], "list[bool] | None"]


class Breaker:
    """Opens for ``wait`` seconds after ``failures`` in a row; each failed retry doubles the wait,
    up to a minute. Thread-safe."""

    def __init__(self, failures: int = 3, wait: float = 1.0) -> None:
        self._limit, self._first_wait = failures, wait
        self._lock = threading.Lock()
        self._failures = 0
        self._wait = wait
        self._until = 0.0  # monotonic seconds: when the breaker closes
        self.trips = 0

    @property
    def open(self) -> bool:
        """Calls are refused now."""
        return time.monotonic() < self._until

    def success(self) -> None:
        with self._lock:
            self._failures, self._wait, self._until = 0, self._first_wait, 0.0

    def retry(self) -> None:
        """Close now, and reset the wait."""
        with self._lock:
            self._wait, self._until = self._first_wait, 0.0

    def failure(self, trip: bool = False) -> None:
        """Count a failure; ``trip`` opens at once."""
        with self._lock:
            self._failures += 1
            if (trip or self._failures >= self._limit) and not self.open:
                self._until = time.monotonic() + self._wait
                self._wait = min(60.0, 2 * self._wait)
                self.trips += 1


class Storage:
    """A store behind a circuit breaker. Lanes call it; any thread may read its properties.

    If a call raises anything, its records are misses and ``faults`` counts it."""

    def __init__(
        self, schema: Schema, store: Store | None, stall_seconds: float, faults: Counter[str]
    ) -> None:
        self._prints = [schema.fingerprint(group) for group in schema.groups]
        self._store, self._stall_seconds, self._faults = store, stall_seconds, faults
        self._calling: dict[str, float] = {}  # by verb: monotonic seconds when its call began
        self.breaker = Breaker()

    @property
    def exists(self) -> bool:
        """There is a store, working or not."""
        return self._store is not None

    @property
    def usable(self) -> bool:
        """There is a store and its breaker is closed."""
        return self.exists and not self.breaker.open

    def names(self, group: int, pages: Iterable[bytes]) -> list[Key]:
        """Storage keys of one group, for pages with these chained keys."""
        mine = self._prints[group]
        return [Key(mine, page) for page in pages]

    def probe(self, keys: Sequence[Key]) -> NDArray[np.bool_]:
        """Which records storage probably has."""
        return self._call("probe", lambda store, keys, _: store.probe(keys), keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Report hits to storage; the last key is the newest."""
        self._call("touch", lambda store, keys, _: store.touch(keys), keys)

    def read(self, keys: Sequence[Key], bodies: Sequence[memoryview]) -> NDArray[np.bool_]:
        """Read records into their bodies; returns which were there."""
        return self._call(
            "read", lambda store, keys, bodies: store.read(keys, bodies), keys, bodies
        )

    def write(self, keys: Sequence[Key], bodies: Sequence[memoryview]) -> NDArray[np.bool_]:
        """Write records, ancestors first in ``keys``; returns which are stored.

        The first call gets the ancestors: it may be the only one that succeeds. Within a call they
        go last, since a store keeps its last keys longest. Nothing else reverses keys."""
        return self._call(
            "write",
            lambda store, keys, bodies: store.write(keys[::-1], bodies[::-1])[::-1],
            keys,
            bodies,
        )

    def hung(self) -> list[str]:
        """Verbs whose call has taken over ``stall_seconds``; each trips the breaker."""
        now, hung = time.monotonic(), []
        for verb, since in list(self._calling.items()):
            if now - since > self._stall_seconds:
                if not self.breaker.open:
                    self._faults["stall"] += 1
                self.breaker.failure(trip=True)
                hung.append(verb)
        return hung

    def _call(
        self, verb: str, call: Call, keys: Sequence[Key], bodies: Sequence[memoryview] = ()
    ) -> NDArray[np.bool_]:
        """A flag per key; False if the breaker refused the call or the call raised."""
        store, flags = self._store, np.zeros(len(keys), dtype=bool)
        if store is None:
            return flags
        for start in range(0, len(keys), CALL_RECORDS):
            if self.breaker.open:
                break
            part = slice(start, start + CALL_RECORDS)
            self._calling[verb] = time.monotonic()
            try:
                answer = call(store, keys[part], bodies[part])
                if answer is not None:
                    flags[part] = np.reshape(answer, len(keys[part]))  # no flag counts twice
                self.breaker.success()
            except BaseException as error:  # also what is no Exception, as pyo3's PanicException
                self._faults[verb] = count = self._faults[verb] + 1
                if count.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                    log.warning("storage %s failed (%d in all): %r", verb, count, error)
                self.breaker.failure()
            finally:
                self._calling.pop(verb, None)
        return flags


class Lookup:
    """A question to storage, asked on the "ask" lane.

    It asks about groups that need every page up to the first gap of a required one, then about the
    other groups up to there; never about pages that memory has.

    Args:
        names: by group, storage keys of the prompt's pages.
        memory: what memory has of them.
    """

    def __init__(self, names: list[list[Key]], memory: Presence) -> None:
        self._names, self._rule = names, memory.rule
        self._mask: Mask = memory.mask.copy()

    @property
    def found(self) -> Presence:
        """What memory and storage have together; valid once :meth:`ask` has returned."""
        return Presence(self._rule, self._mask)

    def ask(self, storage: Storage) -> None:
        """Call the store. Lane's thread."""
        rule, pages = self._rule, self._mask.shape[1]
        for start in range(0, pages if rule.whole else 0, CALL_RECORDS):
            end = min(start + CALL_RECORDS, pages)
            self._complete(storage, rule.whole, start, end)
            if not self._mask[rule.vital, start:end].all():
                break
        vital = self._mask[rule.vital].all(axis=0)
        reach = pages if vital.all() else int(vital.argmin())
        tails = [g for g in range(len(self._mask)) if g not in rule.whole]
        self._complete(storage, tails, 0, reach)

    def _complete(self, storage: Storage, groups: Sequence[int], start: int, end: int) -> None:
        """Ask about pages ``[start, end)`` that these groups lack."""
        lacking = [start + np.flatnonzero(~self._mask[g, start:end]) for g in groups]
        keys = [self._names[g][i] for g, at in zip(groups, lacking, strict=True) for i in at]
        flags = storage.probe(keys)
        for g, at in zip(groups, lacking, strict=True):
            self._mask[g, at], flags = flags[: len(at)], flags[len(at) :]
