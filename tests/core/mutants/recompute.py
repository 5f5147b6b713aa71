"""Mutants of ``core/recompute.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "what loads faster is computed",
        "load or recompute, the wrong way round",
        "core/recompute.py",
        "computing < seconds",
        "computing > seconds",
        killer="test_recompute.py: computes_faster",
    ),
    Mutant(
        "everything is loaded",
        "requests wait for a store that is slower than computing",
        "core/recompute.py",
        "computing < seconds",
        "computing < 0 * seconds",
        killer="test_recompute.py: computes_faster",
    ),
]
