"""How fast something goes, by what was measured lately."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

_HALF_LIFE = 5.0  # seconds until a measurement counts half as much as a new one
_RETRY_SECONDS = 10.0  # without a measurement, until it is time for a new one


class Speed:
    """An exponentially weighted mean. One thread measures, any may ask.

    Amounts are bytes, or tokens; a measurement weighs as much as it took long.
    """

    def __init__(self) -> None:
        self._sums = 0.0, 0.0  # of amounts and of seconds, decayed
        self._under_way: tuple[float, float] | None = None  # an amount, and since when
        self._measured = self._tried = -math.inf  # monotonic seconds

    def observe(self, amount: float, seconds: float) -> None:
        """So much took so long. Nothing tells nothing."""
        if amount <= 0:
            return
        now = time.monotonic()
        decay = 0.5 ** ((now - self._measured) / _HALF_LIFE)
        self._sums = decay * self._sums[0] + amount, decay * self._sums[1] + seconds
        self._measured = self._tried = now

    @contextmanager
    def under_way(self, amount: float) -> Iterator[None]:
        """So much is being done now: if that takes longer than it should, it is seen at once."""
        self._under_way = amount, time.monotonic()
        try:
            yield
        finally:
            self._under_way = None

    def seconds(self, amount: float) -> float | None:
        """How long ``amount`` takes; None: nothing was measured."""
        paces = []
        for done, seconds in (self._sums, self._now()):
            if done:
                paces.append(seconds / done)
        return amount * max(paces) if paces else None

    @property
    def stale(self) -> bool:
        """Nothing was measured for a while, nor tried: it is time to."""
        return time.monotonic() - self._tried > _RETRY_SECONDS

    def tried(self) -> None:
        """A measurement is on its way."""
        self._tried = time.monotonic()

    def _now(self) -> tuple[float, float]:
        amount, since = self._under_way or (0.0, 0.0)
        return amount, time.monotonic() - since
