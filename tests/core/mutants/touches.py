"""Mutants of ``core/touches.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "hits that wait are not bounded",
        "a store that hangs costs memory with every request",
        "core/touches.py",
        "        while self._pages > _MOST_PAGES and len(self._hits) > 1:\n",
        "        while False:\n",
        killer="test_touches.py: oldest_hits",
    ),
    Mutant(
        "the newest hits are dropped",
        "storage recycles what is used now, and keeps what was used long ago",
        "core/touches.py",
        "            self._pages -= len(self._hits.popleft().pages)\n",
        "            self._pages -= len(self._hits.pop().pages)\n",
        killer="test_touches.py: oldest_hits",
    ),
    Mutant(
        "a hit that is longer than the bound is dropped",
        "the longest prompts look unused to storage",
        "core/touches.py",
        " and len(self._hits) > 1:\n",
        ":\n",
        killer="test_touches.py: one_long_hit",
    ),
    Mutant(
        "storage is told of hits while it is told of others",
        "a store that hangs has a call more under way with every tick",
        "core/touches.py",
        "        if self._asking or self.idle:\n",
        "        if not (self._hits or self._merged):\n",
        killer="test_touches.py: one_at_a_time",
    ),
    Mutant(
        "storage is told once",
        "of all that is hit later it never hears",
        "core/touches.py",
        "        self._asking = False\n",
        "        pass\n",
        killer="test_cache.py: refused_load",
    ),
    Mutant(
        "storage hears of ancestors first",
        "it recycles the root before the leaf",
        "core/touches.py",
        "reversed(range(len(hit.pages)))",
        "range(len(hit.pages))",
        killer="test_touches.py: ancestors_are_touched_last",
    ),
    Mutant(
        "storage hears of what a hit did not need",
        "dead pages of a window stay, and useful records are recycled",
        "core/touches.py",
        "                    if page >= first:\n",
        "                    if True:\n",
        killer="test_touches.py: ancestors_are_touched_last",
    ),
    Mutant(
        "a record is told of where its oldest hit puts it",
        "a head that many share is recycled before a tail that one has",
        "core/touches.py",
        "                        self._merged.pop(names[g][page], None)\n",
        "",
        killer="test_touches.py: are_merged",
    ),
    Mutant(
        "hits wait for storage that is out",
        "a cache does not rest until it is back",
        "core/touches.py",
        "            self._hits.clear()\n"
        "            self._merged.clear()\n"
        "            self._pages = 0\n",
        "            return\n",
        killer="test_touches.py: cannot_hear",
    ),
    Mutant(
        "a call is as long as all hits",
        "the questions of new requests wait behind it",
        "core/touches.py",
        "list(self._merged)[:CALL_RECORDS]",
        "list(self._merged)",
        killer="test_touches.py: waits_for_one_call",
    ),
]
