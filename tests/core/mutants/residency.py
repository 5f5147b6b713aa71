"""Mutants of ``core/residency.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "a priority has no end",
        "what mattered once is never evicted",
        "core/residency.py",
        "(table.until <= now)",
        "(table.until < 0)",
        killer="test_policies.py: from_the_last_use",
    ),
    Mutant(
        "a priority that ends is not told to eviction",
        "what matters goes before what mattered",
        "core/residency.py",
        "                tier.offer(group, over)\n",
        "                pass\n",
        killer="test_policies.py: as_their_times_say",
    ),
    Mutant(
        "ids are recycled while held",
        "a page retired in mid-flight comes back as another page under its ticket",
        "core/residency.py",
        "over = table.holds[ids] == ZERO",
        "over = table.holds[ids] >= ZERO",
        killer="test_cache.py: left_the_tree",
    ),
    Mutant(
        "a page is retired under its copy",
        "a lane fills a slot that is somebody else's by now",
        "core/residency.py",
        "        self._reap(gone)\n",
        "        for tier in (self.device, self.host):\n"
        "            for group in range(len(self.schema.groups)):\n"
        "                idle = table.pins[tier.index, group][gone] == 0\n"
        "                idle &= table.slot[tier.index, group][gone] != NO_SLOT\n"
        "                tier.drop(group, gone[idle])\n"
        "        self._reap(gone)\n",
        killer="test_cache.py: two_loads",
    ),
    Mutant(
        "only first pages are retired",
        "what is below stays in the tree, and serves a hit that has no bytes",
        "core/residency.py",
        "(above < 0) | ~table.dying[above]",
        "above < 0",
        killer="test_cache.py: joins_a_read",
    ),
    Mutant(
        "what is half committed stays in the tree",
        "its pages have no slots, and serve no hit",
        "core/residency.py",
        "            self._end(group, self._inside())\n",
        "            pass\n",
        killer="test_mend.py: requests_go_on and without",
    ),
    Mutant(
        "an evicted page stays in the tree",
        "all that is below keeps slots and serves no hit",
        "core/residency.py",
        "        pages = tier.evict(group, count)\n        self._end(group, pages)\n",
        "        pages = tier.evict(group, count)\n",
        killer="test_cache.py: path_that_ended",
    ),
    Mutant(
        "a path without slots is not trimmed",
        "where no group needs every page, the tree grows forever",
        "core/residency.py",
        "        elif self._trims:\n            self._trim(pages)\n",
        "",
        killer="test_cache.py: forgets_paths",
    ),
    Mutant(
        "what was held is not trimmed",
        "the same, through requests that came to nothing",
        "core/residency.py",
        "        if self._trims:\n            self._trim(ids)\n",
        "",
        killer="test_cache.py: came_to_nothing",
    ),
    Mutant(
        "what somebody uses is dropped with what is idle",
        "under write-back a request loses what it reads",
        "core/residency.py",
        "        self.drop(tier, group, pages[tier.evictable(group, pages)])\n",
        "        self.drop(tier, group, pages)\n",
        killer="test_policies.py: others_wait_with",
    ),
    Mutant(
        "what only the host has is not present",
        "every hit on the host is computed",
        "core/residency.py",
        "        if count(here) < here.size:\n",
        "        if False:\n",
        killer="test_cache.py: comes_back_from_every_tier and two and host",
    ),
]
