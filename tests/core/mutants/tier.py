"""Mutants of ``core/tier.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "a second unpin frees a slot",
        "a scheduler is told of room that is in use",
        "core/tier.py",
        "self._busy[group] -= len(pages) - count(pinned)",
        "self._busy[group] -= len(pages)",
        killer="test_cache.py: one_token",
    ),
    Mutant(
        "a broken row is not contained",
        "one page's damage ends the scheduler",
        "core/tier.py",
        "            bad = (row != NO_SLOT) | (state != ABSENT)\n",
        "            bad = state != ABSENT\n",
        killer="test_mend.py: requests_go_on and absent",
    ),
    Mutant(
        "a row that is somebody else's is believed",
        "its page is served with another page's bytes",
        "core/tier.py",
        "            sound = (row[pages] == at) & (state",
        "            sound = (state",
        killer="test_mend.py: requests_go_on and elsewhere",
    ),
    Mutant(
        "what is being filled is believed to be there",
        "it is read before its bytes came",
        "core/tier.py",
        "            proper[filling[group]] = WRITING\n",
        "            proper[filling[group]] = LIVE\n",
        killer="test_mend.py: requests_go_on and early",
    ),
    Mutant(
        "an owner that no row knows is forgotten",
        "the page gets another slot, and a ticket that comes back for the first unpins that",
        "core/tier.py",
        "            bad[pages] = True\n",
        "",
        killer="test_mend.py: lost_its_slot",
    ),
    Mutant(
        "the old batch of victims is kept",
        "whom a failed eviction had taken out of it outlives those that were used later",
        "core/tier.py",
        "            self._queues[group] = self._queue(group)\n",
        "",
        killer="test_mend.py: victims_of",
    ),
    Mutant(
        "a slot that somebody has is reserved",
        "two requests write to it",
        "core/tier.py",
        "if count(of.owner[places] != _FREE) or count(slots[..., 1:] == slots[..., :-1]):\n",
        "if count(slots[..., 1:] == slots[..., :-1]):\n",
        killer="test_mend.py: nobody_looks_for and free",
    ),
    Mutant(
        "a slot is reserved twice at once",
        "two pages of one request are in it",
        "core/tier.py",
        "if count(of.owner[places] != _FREE) or count(slots[..., 1:] == slots[..., :-1]):\n",
        "if count(of.owner[places] != _FREE):\n",
        killer="test_mend.py: nobody_looks_for and free",
    ),
    Mutant(
        "a row's slot is not checked",
        "what is another page's, or nowhere, is read and freed",
        "core/tier.py",
        "        if count(of.owner[places] != pages):\n",
        "        if False:\n",
        killer="test_mend.py: nobody_looks_for and row or costs_its_page",
    ),
    Mutant(
        "what is private to nobody stays private",
        "each containment leaks the slots of the leases that it cost",
        "core/tier.py",
        "            owner[:-1] = _FREE\n",
        "            owner[:-1][owner[:-1] >= 0] = _FREE\n",
        killer="test_cache.py: broke_reads_nothing",
    ),
    Mutant(
        "what is out of the tree keeps its slots while it is held",
        "requests that wait hold a path, and with its slots of some groups all who come before",
        "core/tier.py",
        "row &= over | self.table.idle(self.index, group, pages)\n",
        "row &= over\n",
        killer="test_cache.py: path_that_ended",
    ),
]
