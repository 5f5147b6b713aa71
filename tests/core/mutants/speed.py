"""Mutants of ``core/speed.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "a call under way tells nothing",
        "the first read of a slow store is waited for to its end",
        "core/speed.py",
        "known = self._sums, (moving, time.monotonic() - since)",
        "known = (self._sums,)",
        killer="test_recompute.py: under_way",
    ),
    Mutant(
        "speed never forgets",
        "what was slow yesterday is not read today",
        "core/speed.py",
        "decay = 0.5 ** ((now - self._measured) / _HALF_LIFE)",
        "decay = 1.0",
        killer="test_recompute.py: forgets",
    ),
]
