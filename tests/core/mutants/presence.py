"""Mutants of ``core/presence.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "a hit ends at the first gap",
        "a window's gap far back ends a hit that does not need it",
        "core/presence.py",
        "int(np.flatnonzero(fits)[-1])",
        "int(np.cumprod(fits).sum()) - 1",
        killer="test_cache.py: comes_back_from_every_tier and four",
    ),
    Mutant(
        "a hit may have gaps in a group that needs every page",
        "a model attends to what was never there",
        "core/presence.py",
        "            pages = int(every.argmin())\n",
        "            pages = int(every.sum())\n",
        killer="test_presence.py: test_the_hit_rule",
    ),
    Mutant(
        "a hit needs one page less of a window",
        "the first token after a hit attends to what is not there",
        "core/presence.py",
        "missing[np.maximum(np.arange(pages + 1) - tail, 0)]",
        "missing[np.maximum(np.arange(pages + 1) - tail + 1, 0).clip(max=pages)]",
        killer="test_cache.py: forgets_paths",
    ),
    Mutant(
        "a group that a hit may do without shortens it",
        "under lenient a draft's state that is gone costs the target's hit",
        "core/presence.py",
        "self.counted_tails = [(g, tail) for g, tail in self._tails if counted[g]]",
        "self.counted_tails = self._tails",
        killer="test_presence.py: test_the_hit_rule",
    ),
    Mutant(
        "a group that a hit may do without is named as its limit",
        "an operator gives room to the wrong group",
        "core/presence.py",
        "for g in self.rule.counted if g in lacking",
        "for g in range(len(self.mask)) if g in lacking",
        killer="test_cache.py: may_do_without_does_not_limit",
    ),
    Mutant(
        "where no group counts every known prefix is a hit",
        "a request is served without any state",
        "core/presence.py",
        "            return 0  # or every",
        "            return int(pages)  # or every",
        killer="test_presence.py: test_the_hit_rule",
    ),
    Mutant(
        "a hit needs all of a window's pages",
        "dead pages are read, and evict what is of use",
        "core/presence.py",
        "            mask[g, : max(0, pages - tail)] = False\n",
        "            pass\n",
        killer="test_presence.py: row_per_group",
    ),
    Mutant(
        "the beginning of a run is judged by all of it",
        "a prefetch for which there is little room reads what is of no use",
        "core/presence.py",
        "        return Presence(self.rule, self.mask[:, :pages])\n",
        "        return self\n",
        killer="test_presence.py: judged_alone",
    ),
]
