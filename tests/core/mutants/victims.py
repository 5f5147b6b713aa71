"""Mutants of ``core/victims.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "victims are not checked again",
        "a page that was used since it was chosen goes all the same",
        "core/victims.py",
        "            good = fit & (self._key(pages) == keys)\n",
        "            good = fit\n",
        killer="test_tier.py: used_since",
    ),
    Mutant(
        "late comers wait for the next batch",
        "an old page that was pinned outlives newer ones",
        "core/victims.py",
        "late = keys <= self._horizon",
        "late = keys < 0",
        killer="test_tier.py: late_comers",
    ),
    Mutant(
        "what is hit while it waits to be evicted leaves the line",
        "what was hit more often goes before it",
        "core/victims.py",
        "self._merge(pages[fit])",
        "self._merge(pages[good])",
        killer="test_tier.py: victims_come",
    ),
    Mutant(
        "late comers are merged by page",
        "an old page that was pinned outlives newer ones",
        "core/victims.py",
        "np.lexsort((pages, keys))",
        "np.lexsort((keys, pages))",
        killer="test_tier.py: late_comers or goes_first",
    ),
]
