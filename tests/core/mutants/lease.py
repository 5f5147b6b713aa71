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
    Mutant(
        "a lease that has ended waits for its loads",
        "its request never asks again",
        "core/lease.py",
        "        self.arriving.clear()\n",
        "",
        killer="test_cache.py: two_loads",
    ),
    Mutant(
        "a prefetch that is done is waited for",
        "its request is never scheduled",
        "core/lease.py",
        "        return self.phase < Phase.DONE\n",
        "        return self.phase <= Phase.DONE\n",
        killer="test_recompute.py: storage_has_is_too_short",
    ),
    Mutant(
        "a prefetch whose reads are lost is not done",
        "its request is never scheduled",
        "core/lease.py",
        "        if self.phase is Phase.READING and not self.reads:\n"
        "            self.phase = Phase.DONE\n",
        "",
        killer="test_cache.py: bookkeeping_costs and read",
    ),
    Mutant(
        "a cut is found again where a chunk ended",
        "chunks have no tokens, and the request stands still",
        "core/lease.py",
        "if cut > position)",
        "if cut >= position)",
        killer="test_cache.py: interim_snapshots",
    ),
]
