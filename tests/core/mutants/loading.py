"""Mutants of ``core/loading.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "landing stamps",
        "a child becomes newer than its ancestor, so the ancestor goes first",
        "core/loading.py",
        "            self._device.publish(move.group, move.pages[move.landed])\n",
        "            self._device.publish(move.group, move.pages[move.landed])\n"
        "            clock = self._table.clocks[move.group]\n"
        "            self._table.used[clock, move.pages] = self._table.tick()\n",
    ),
    Mutant(
        "loads under way are not joined",
        "a lease is ready while its pages are on their way",
        "core/loading.py",
        "if ticket.kind == LOAD and ticket.touches(lease.path):",
        "if False:",
        killer="test_cache.py: 64_requests",
    ),
    Mutant(
        "the hit rule is not run again after a failed load",
        "a request runs on pages that are not there",
        "core/loading.py",
        "        if pages < lease.pages:\n            lease.explanation",
        "        if False:\n            lease.explanation",
        killer="test_cache.py: load_that_fails_shortens",
    ),
    Mutant(
        "a hit is judged by what the lease waited for alone",
        "pages that somebody else brought meanwhile are thrown away",
        "core/loading.py",
        "            | self._table.where(DEVICE, g, lease.path, Residence.LIVE)\n",
        "",
        killer="test_cache.py: there_at_last",
    ),
    Mutant(
        "who went on is measured by the hit rule again",
        "pages that it has committed are taken from it",
        "core/loading.py",
        "lease.pages <= len(lease.origin)",
        "True",
        killer="test_loading.py: goes_on",
    ),
    Mutant(
        "what was outrun stays pinned",
        "a window's dead pages cannot be evicted",
        "core/loading.py",
        "                self._slots.slide(move.group, lease, group.needed(lease.pages).start)\n",
        "                pass\n",
        killer="test_loading.py: goes_on",
    ),
]
