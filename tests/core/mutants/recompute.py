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
    Mutant(
        "measured speeds count though they must not",
        "an operator who says never gets recomputed prompts",
        "core/recompute.py",
        'self.prefill.seconds(tokens) if self._policy.recompute == "auto" else None',
        "self.prefill.seconds(tokens)",
        killer="test_recompute.py: faster_is_not_read",
    ),
]
