"""Mutants of ``core/loading.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "landing stamps",
        "a child becomes newer than its ancestor, so the ancestor goes first",
        "core/loading.py",
        '                self._counts["missed_loads_total"] += len(move.lost)\n',
        '                self._counts["missed_loads_total"] += len(move.lost)\n'
        "                clock = self._table.clocks[move.group]\n"
        "                self._table.used[clock, move.arrived] = self._table.tick()\n",
        killer="test_cache.py: nobody_waits_for_any_more",
    ),
    Mutant(
        "a hit does not promote",
        "under write-back the memory tiers hold everything twice",
        "core/loading.py",
        "                    self._residency.drop_idle("
        "self._residency.host, move.group, move.arrived)\n",
        "                    pass\n",
        killer="test_policies.py: hit_promotes",
    ),
    Mutant(
        "loads under way are not joined",
        "a lease is ready while its pages are on their way",
        "core/loading.py",
        "[one.arrival for one in self._flights.filling(LOAD, lease.path)]",
        "[]",
        killer="test_cache.py: two_loads",
    ),
    Mutant(
        "a hit is final when its first load is back",
        "pages of the second are taken from it",
        "core/loading.py",
        "                if coming.isdisjoint(lease.arriving):\n",
        "                if True:\n",
        killer="test_cache.py: there_at_last",
    ),
    Mutant(
        "what has landed is not pinned",
        "the device evicts what a request reads",
        "core/loading.py",
        "            self.slots.pin(g, lease, ids[mine])\n",
        "            pass\n",
        killer="test_loading.py: goes_on and two",
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
        "(lease.table[:, : lease.pages] != NO_SLOT) | live)",
        "lease.table[:, : lease.pages] != NO_SLOT)",
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
        "pages that a window slid past stay pinned",
        "a window's dead pages cannot be evicted",
        "core/loading.py",
        "                self.slots.slide(g, lease, group.needed(lease.pages).start)\n",
        "                pass\n",
        killer="test_loading.py: goes_on",
    ),
    Mutant(
        "a gap that a failed load left is read",
        "a lenient hit attends to a page that is not there",
        "core/loading.py",
        "                lease.first_valid[g] = int(gaps[-1]) + 1 if len(gaps) else 0\n",
        "                pass\n",
        killer="test_cache.py: lenient_load_that_fails",
    ),
    Mutant(
        "a slow load is never tried again",
        "and stays slow forever",
        "core/loading.py",
        "known if slow and not self._transfers.speeds[LOAD].stale else pages",
        "known if slow else pages",
        killer="test_recompute.py: slow_load_is_tried",
    ),
    Mutant(
        "what is on the device is computed with the rest",
        "a hit that costs nothing is thrown away",
        "core/loading.py",
        "known if slow and",
        "0 if slow and",
        killer="test_recompute.py: on_the_device_is_used",
    ),
    Mutant(
        "what came from storage counts as the host's",
        "an operator believes that storage is of no use",
        "core/loading.py",
        "np.where(np.isin(path, fetched), 2, 1)",
        "1",
        killer="test_cache.py: comes_back_from_every_tier and two and storage",
    ),
    Mutant(
        "every hit is told to come from the device",
        "an operator believes that the host and storage are of no use",
        "core/loading.py",
        "        if any(map(len, (*plan.load, *plan.gaps))):\n",
        "        if False:\n",
        killer="test_cache.py: comes_back_from_every_tier and two and host",
    ),
    Mutant(
        "a load that failed is forgotten while others are in flight",
        "a step reads slots that nothing filled, and commits what it made of them",
        "core/loading.py",
        "            elif not ticket.arrival.failed:\n",
        "            else:\n",
        killer="test_loading.py: one_that_has_failed",
    ),
]
