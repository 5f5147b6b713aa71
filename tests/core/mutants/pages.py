"""Mutants of ``core/pages.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "one hit keeps a window",
        "every turn of every conversation is kept, and none is whole",
        "core/pages.py",
        "MANY = 2",
        "MANY = 1",
        killer="test_cache.py: of_two_hits",
    ),
    Mutant(
        "a page does not know the one before",
        "a path that nothing is left of is trimmed down to where a request began",
        "core/pages.py",
        "path[-1] if len(path) else -1",
        "-1",
        killer="test_pages.py: know_depth",
    ),
    Mutant(
        "a recycled id keeps its past",
        "a fresh page has another's clocks and hints",
        "core/pages.py",
        "            row[ids] = 0\n",
        "            pass\n",
        killer="test_pages.py: comes_back_fresh",
    ),
    Mutant(
        "a priority is that of the last request",
        "one that matters less makes a shared prefix go first",
        "core/pages.py",
        "np.maximum(self.priority[path], retention.priority)",
        "retention.priority",
        killer="test_policies.py: priority_keeps or leaf_first",
    ),
    Mutant(
        "a time is that of the last request",
        "a short one ends what a long one was promised, and ancestors go before descendants",
        "core/pages.py",
        "np.maximum(self.until[path], time.monotonic() + retention.ttl)",
        "time.monotonic() + retention.ttl",
        killer="test_policies.py: as_their_times_say",
    ),
    Mutant(
        "eviction ignores pins",
        "a slot goes while a request or a lane uses it",
        "core/pages.py",
        "        fit &= self.pins[tier, group][ids] == ZERO\n",
        "",
        killer="test_tier.py: late_comers or victims_come",
    ),
    Mutant(
        "what is dying is evicted",
        "whoever still uses its slot reads another page's bytes",
        "core/pages.py",
        "self.idle(tier, group, ids) & ~self.dying[ids]",
        "self.idle(tier, group, ids)",
        killer="test_tier.py: dying",
    ),
]
