"""Mutants of ``core/slots.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "pages that slid by stay warm",
        "a long request's dead window pages outlive idle sessions' useful tails",
        "core/slots.py",
        "= 0\n        self._",
        "= self._table.clock\n        self._",
    ),
    Mutant(
        "loading does not pin its source",
        "the host evicts what is being copied from it",
        "core/slots.py",
        "        self._host.pin(g, load)\n",
        "",
    ),
    Mutant(
        "duplicates are kept",
        "two requests with one prompt hold it twice",
        "core/slots.py",
        "at[state == ABSENT], at[state == LIVE]",
        "at[state == ABSENT], at[:0]",
    ),
    Mutant(
        "duplicates are neither adopted nor pinned",
        "what is computed serves nobody else",
        "core/slots.py",
        "        state = self._table.state[DEVICE, g][path[at]]\n",
        "        at = at[:0]\n        state = self._table.state[DEVICE, g][path[at]]\n",
    ),
    Mutant(
        "commit does not repoint",
        "the lease goes on reading the slot that it has just freed",
        "core/slots.py",
        "        share.slots[settled] = self._device.pin(g, path[settled])\n",
        "        self._device.pin(g, path[settled])\n",
    ),
    Mutant(
        "a duplicate's own slot is not freed",
        "the device leaks a slot for each page computed twice",
        "core/slots.py",
        "            self._device.free(g, share.slots[known])\n",
        "            pass\n",
    ),
    Mutant(
        "a snapshot is published that was not taken",
        "a hit starts from whatever the slot held",
        "core/slots.py",
        "            at = at[np.isin(at, list(snapshots))]\n",
        "            pass\n",
    ),
    Mutant(
        "snapshots that hits will end at go first",
        "the next turn of a conversation finds nothing to start from",
        "core/slots.py",
        "            dead &= ~np.isin(ends, list(lease.lasting))\n",
        "            pass\n",
    ),
    Mutant(
        "no interim snapshots",
        "a request that is preempted starts again from its prompt",
        "core/slots.py",
        "if every and any(",
        "if False and any(",
    ),
    Mutant(
        "a snapshot must have room",
        "requests are refused for want of a luxury",
        "core/slots.py",
        "            if not group.working:\n                return False\n",
        "            return False\n",
    ),
    Mutant(
        "working slots are taken before the hit is pinned",
        "a request evicts the very snapshot that it needs",
        "core/slots.py",
        "        self.pin(g, share, live)\n",
        "        self._residency.make_room(self._device, g, group.working)\n"
        "        live = live[self._table.where(DEVICE, g, live, Residence.LIVE)]\n"
        "        self.pin(g, share, live)\n",
        killer="test_cache.py: do_not_cost",
    ),
    Mutant(
        "a refused request keeps its sources",
        "admit is all or nothing",
        "core/slots.py",
        "                self._host.unpin(g, load)\n            return None\n",
        "                pass\n            return None\n",
        killer="test_cache.py: refused_load",
    ),
    Mutant(
        "a lenient hit reads before its gap",
        "missing rows are masked, never read",
        "core/slots.py",
        "share.valid_from = int(gaps[-1]) + 1\n        ids",
        "share.valid_from = int(gaps[-1])\n        ids",
        killer="test_cache.py: missing_optional",
    ),
    Mutant(
        "room is made in vain",
        "a request that one group has no room for empties the others",
        "core/slots.py",
        "        if any(self._device.available(g) < need for g, need in enumerate(needs)):\n"
        "            return False\n",
        "",
        killer="test_policies.py: nothing_leaves_for_the_others",
    ),
    Mutant(
        "room is made group by group",
        "a request is refused once for each",
        "core/slots.py",
        "        free = [self._residency.make_room(self._device, g, n) "
        "for g, n in enumerate(needs)]\n",
        "        free = list(needs)\n"
        "        for g, need in enumerate(needs):\n"
        "            free[g] = self._residency.make_room(self._device, g, need)\n"
        "            if free[g] < need:\n"
        "                break\n",
        killer="test_policies.py: make_room_at_once",
    ),
]
