"""Mutants of ``core/lease.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "nobody knows where pages will be",
        "a step writes over slot -1",
        "core/lease.py",
        "            slots[pages] = targets\n",
        "",
        killer="test_loading.py: tells_where",
    ),
]
