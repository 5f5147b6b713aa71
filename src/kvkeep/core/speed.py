"""Recent speed of a transfer or a computation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

_HALF_LIFE = 5.0  # seconds until a measurement counts half as much as a new one
_RETRY_SECONDS = 10.0  # without a measurement until ``stale``


class Speed:
    """Seconds per amount (bytes or tokens): a mean weighted by duration that decays exponentially.
    One thread measures; any thread may ask."""

    def __init__(self) -> None:
        self._sums = 0.0, 0.0  # decayed amounts and seconds
        self._under_way: tuple[float, float] | None = None  # an amount and its start
        self._measured = self._tried = -math.inf  # monotonic seconds

    def observe(self, amount: float, seconds: float) -> None:
        """Record ``amount`` done in ``seconds``; ignore zero."""
        if amount <= 0:
            return
        now = time.monotonic()
        decay = 0.5 ** ((now - self._measured) / _HALF_LIFE)
        self._sums = decay * self._sums[0] + amount, decay * self._sums[1] + seconds
        self._measured = self._tried = now

    @contextmanager
    def under_way(self, amount: float) -> Iterator[None]:
        """Around work on ``amount``: a slow call shows before it ends."""
        self._under_way = amount, time.monotonic()
        try:
            yield
        finally:
            self._under_way = None

    def seconds(self, amount: float) -> float | None:
        """Seconds that ``amount`` takes; None: not measured yet."""
        moving, since = self._under_way or (0.0, 0.0)
        known = self._sums, (moving, time.monotonic() - since)
        paces = [seconds / done for done, seconds in known if done]
        return amount * max(paces) if paces else None

    @property
    def stale(self) -> bool:
        """No measurement was made or begun lately."""
        return time.monotonic() - self._tried > _RETRY_SECONDS

    def tried(self) -> None:
        """Note that a measurement has begun."""
        self._tried = time.monotonic()
