"""Mutants of ``core/breaker.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "the breaker never opens",
        "every request waits for a store that is gone",
        "core/breaker.py",
        "if (trip or self._failures >= self._limit) and not self.open:",
        "if False:",
        killer="test_storage.py: failures_in_a_row",
    ),
    Mutant(
        "each retry comes as soon as the first",
        "a store that is gone for an hour is asked every second",
        "core/breaker.py",
        "self._wait = min(60.0, 2 * self._wait)",
        "self._wait = min(60.0, self._wait)",
        killer="test_storage.py: it_waits_longer",
    ),
    Mutant(
        "a retry waits as long as the last one",
        "who closes a cache waits a minute for a store that is gone",
        "core/breaker.py",
        "self._wait, self._until = self._first_wait, 0.0",
        "self._until = 0.0",
        killer="test_storage.py: told_to_try_again",
    ),
]
