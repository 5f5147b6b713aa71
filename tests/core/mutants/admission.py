"""Mutants of ``core/admission.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "hits are not counted",
        "a prefix that many share goes with the first long request that slides past it",
        "core/admission.py",
        "            if pages:\n                self._hit(lease)\n",
        "",
        killer="test_cache.py: of_two_hits",
    ),
    Mutant(
        "hits count where they end",
        "an ancestor is hit less often than its descendants, so it goes first",
        "core/admission.py",
        "        table.reused[path] += ONE\n",
        "        table.reused[path[-1:]] += ONE\n",
        killer="test_policies.py: lfu_keeps or leaf_first",
    ),
    Mutant(
        "a hit stamps nothing",
        "a prefix that every request uses is evicted as if nobody did",
        "core/admission.py",
        "        self._residency.stamp(path)\n",
        "",
        killer="test_cache.py: of_two_hits",
    ),
    Mutant(
        "storage does not hear of hits in memory",
        "it recycles first what is used most, and a restart finds nothing",
        "core/admission.py",
        "            self._touches.add(table.keys(path), firsts)\n",
        "            pass\n",
        killer="test_touches.py: hit_in_memory",
    ),
    Mutant(
        "storage hears of pages that a hit does not need",
        "dead pages of a window stay, and useful records are recycled",
        "core/admission.py",
        "            self._touches.add(table.keys(path), firsts)\n",
        "            self._touches.add(table.keys(path), [0] * len(firsts))\n",
        killer="test_cache.py: storage_hears",
    ),
    Mutant(
        "running state needs no room",
        "a request is granted whose state has no slot, and its lease is lost",
        "core/admission.py",
        "            group.working + len(load) + (0",
        "            len(load) + (0",
        killer="test_cache.py: do_not_cost",
    ),
    Mutant(
        "what is loaded needs no room",
        "a hit on the host is refused as broken, though evicting would make room for it",
        "core/admission.py",
        "            group.working + len(load) + (0",
        "            group.working + (0",
        killer="test_cache.py: refused_load",
    ),
    Mutant(
        "making room may evict what is to be loaded",
        "under write-back the hit itself leaves the host before its load departs",
        "core/admission.py",
        "            self._host.pin(g, load)\n"
        "        room = self._backup.make_room(needs)\n"
        "        for g, load in loads:\n"
        "            self._host.unpin(g, load)\n",
        "            pass\n        room = self._backup.make_room(needs)\n",
        killer="test_policies.py: costs_not_the_hit",
    ),
    Mutant(
        "a refused request keeps its sources",
        "the host can never evict what was to be loaded for it",
        "core/admission.py",
        "        for g, load in loads:\n"
        "            self._host.unpin(g, load)\n"
        "        return room\n",
        "        return room\n",
        killer="test_cache.py: refused_load",
    ),
    Mutant(
        "a refused request keeps its pins",
        "the device can never evict the prefix of a request that nobody runs",
        "core/admission.py",
        "                self._slots.let_go(lease, 0)\n",
        "",
        killer="test_cache.py: do_not_cost",
    ),
    Mutant(
        "a refused request keeps its holds",
        "pages that end are never recycled",
        "core/admission.py",
        "                self._residency.unhold(lease.path)\n",
        "",
        killer="test_cache.py: refused_load",
    ),
    Mutant(
        "room for running state is made before the hit is pinned",
        "a request evicts the very snapshot that it needs",
        "core/admission.py",
        "            plan = self._slots.pin_hit(",
        "            self._backup.make_room([group.working for group in self._groups])\n"
        "            plan = self._slots.pin_hit(",
        killer="test_cache.py: do_not_cost",
    ),
    Mutant(
        "nobody asks whether all of a request fits",
        "requests are admitted that are preempted again, over and over",
        "core/admission.py",
        "        if total and not self._fits(known, total, chunk):\n",
        "        if False:\n",
        killer="test_cache.py: room_counts or room_in_a_window",
    ),
    Mutant(
        "shared pages need room again",
        "requests with one prefix wait for room that they do not need",
        "core/admission.py",
        "            if self._device.available(g) + shared < need:\n",
        "            if self._device.available(g) < need:\n",
        killer="test_cache.py: room_counts",
    ),
    Mutant(
        "a window needs room for all that it ever passes",
        "long requests are refused though they hold a few pages at a time",
        "core/admission.py",
        "need = min(need, group.tail + step) + group.working",
        "need += group.working",
        killer="test_cache.py: room_in_a_window",
    ),
    Mutant(
        "grow takes slots without making room",
        "a full device costs the request its lease, though idle pages could go",
        "core/admission.py",
        "            if not self._backup.make_room(needs):\n                return False\n",
        "",
        killer="test_cache.py: growing_is_all",
    ),
    Mutant(
        "windows slide in grow",
        "a rejected draft does not find its window again",
        "core/admission.py",
        "            self._slots.extend(lease, more)\n            return True\n",
        "            self._slots.extend(lease, more)\n"
        "            for g, group in enumerate(self._groups):\n"
        "                if group.tail is not None:\n"
        "                    start = min(lease.pages, group.needed(pages).start)\n"
        "                    self._slots.slide(g, lease, start)\n"
        "            return True\n",
        killer="test_cache.py: rejected_draft",
    ),
    Mutant(
        "snapshots get no room while other pages are idle",
        "a prompt's end has no snapshot, and the next turn computes all of it again",
        "core/slots.py",
        "        self._backup.make_room(snapshots)\n",
        "",
        killer="test_cache.py: idle_snapshot",
    ),
    Mutant(
        "a lease that breaks while it grows is kept",
        "what it had half done has an owner that knows nothing of it",
        "core/admission.py",
        "        with self._audit.guard(lease=lease):\n            self._slots.plan_cuts(",
        "        with self._audit.guard(lease.path):\n            self._slots.plan_cuts(",
        killer="test_mend.py: lease_that_breaks and reserve",
    ),
    Mutant(
        "an admitted request keeps its prefetch",
        "its share of host memory is never given back",
        "core/admission.py",
        "            if prefetch:\n                self._prefetcher.close(prefetch)\n",
        "",
        killer="test_cache.py: share_a_part",
    ),
    Mutant(
        "a request that wants every token's logits hits all the same",
        "log-probabilities of its prompt are missing",
        "core/admission.py",
        " if reuse else NO_IDS",
        "",
        killer="test_input.py: hit_nothing",
    ),
    Mutant(
        "what shall not be stored is stored",
        "others see that somebody sent this prompt",
        "core/admission.py",
        "        lease.detached = not retention.keep\n",
        "",
        killer="test_input.py: leave_nothing",
    ),
    Mutant(
        "an admission that breaks keeps its hit",
        "its request is refused for the same page again and again",
        "core/admission.py",
        "        with self._audit.guard(lease=lease):\n            self._table.hold(",
        "        with self._audit.guard():\n            self._table.hold(",
        killer="test_cache.py: costs_its_hit",
    ),
    Mutant(
        "a lease that is interrupted as it is granted is kept",
        "its caller never got it, so nobody releases it",
        "core/admission.py",
        "        with self._audit.guard(lease=lease):\n            self._table.hold(",
        "        with self._audit.guard(lease.path):\n            self._table.hold(",
        killer="test_review.py: granted_but_not_returned",
    ),
]
