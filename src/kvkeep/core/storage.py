"""The store as lanes see it: calls of bounded size, contained failures, one circuit breaker."""

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
"""Records in one call of a store, at most."""

Call = Callable[[Store, Sequence[Key], Sequence[memoryview]], "list[bool] | None"]


class Storage:
    """A store behind a circuit breaker. Lanes call it; any thread may read its state.

    A call that raises, whatever it raises, is a miss for its records and counted in ``faults``.
    """

    def __init__(
        self, schema: Schema, store: Store | None, stall_seconds: float, faults: Counter[str]
    ) -> None:
        self._prints = [schema.fingerprint(group) for group in schema.groups]
        self._store, self._stall_seconds, self._faults = store, stall_seconds, faults
        self._calling: dict[str, float] = {}  # verb -> monotonic seconds at which its call began
        self.breaker = Breaker()

    @property
    def exists(self) -> bool:
        """There is a store, whether it works or not."""
        return self._store is not None

    @property
    def usable(self) -> bool:
        """There is a store, and its breaker is closed."""
        return self.exists and not self.breaker.open

    def names(self, group: int, pages: Iterable[bytes]) -> list[Key]:
        """Storage's names of one group of the pages with these chained keys."""
        mine = self._prints[group]
        return [Key(mine, page) for page in pages]

    def probe(self, keys: Sequence[Key]) -> NDArray[np.bool_]:
        """Which records storage seems to have."""
        return self._call("probe", lambda store, keys, _: store.probe(keys), keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Tell storage of hits; the last key is the newest."""
        self._call("touch", lambda store, keys, _: store.touch(keys), keys)

    def read(self, keys: Sequence[Key], bodies: Sequence[memoryview]) -> NDArray[np.bool_]:
        """Read records into their bodies; which of them were there."""
        return self._call(
            "read", lambda store, keys, bodies: store.read(keys, bodies), keys, bodies
        )

    def write(self, keys: Sequence[Key], bodies: Sequence[memoryview]) -> NDArray[np.bool_]:
        """Write records, ancestors first in ``keys``; which of them are stored.

        A store keeps the last keys of a call longest, and pages below a gap are useless: so each
        call gets its ancestors last. Of all calls the first has the ancestors: it may be the only
        one that succeeds. Nothing else reverses keys.
        """
        return self._call(
            "write",
            lambda store, keys, bodies: store.write(keys[::-1], bodies[::-1])[::-1],
            keys,
            bodies,
        )

    def hung(self) -> list[str]:
        """Verbs whose call takes longer than ``stall_seconds``; each trips the breaker."""
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
        """A flag per key; False where the breaker refused the call or the call raised."""
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
