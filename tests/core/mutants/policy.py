"""Mutants of ``core/policy.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "eviction ignores depth",
        "among pages of one clock the root goes before the leaf",
        "core/policy.py",
        "((1 << _DEPTH_BITS) - 1 - table.depth[ids])",
        "table.depth[ids]",
        killer="test_tier.py: deepest",
    ),
]
