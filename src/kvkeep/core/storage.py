"""The store as lanes see it: bounded calls, contained failures, a circuit breaker."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..schema import Key, Schema
from ..stores.base import Store
from .breaker import Breaker

log = logging.getLogger(__name__)

CALL_RECORDS = 256
"""Most records in one call of a store."""

Call = Callable[[Store, Sequence[Key], Sequence[memoryview]], "list[bool] | None"]


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
                log.warning("storage %s failed: %r", verb, error)
                self._faults[verb] += 1
                self.breaker.failure()
            finally:
                self._calling.pop(verb, None)
        return flags
