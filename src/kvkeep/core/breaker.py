"""A circuit breaker."""

from __future__ import annotations

import threading
import time


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
