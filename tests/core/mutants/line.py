"""Mutants of ``core/line.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "what could not be written goes behind what came later",
        "an outage that begins again costs ancestors first",
        "core/line.py",
        "            self.entries[group].insert(0, pages)\n",
        "            self.entries[group].append(pages)\n",
        killer="test_policies.py: when_storage_went_out",
    ),
    Mutant(
        "what waits is not held",
        "its id is recycled, and another page is saved in its place",
        "core/line.py",
        "            self._residency.table.hold(pages)\n",
        "",
        killer="test_policies.py: waits_for_storage_waits",
    ),
    Mutant(
        "a page that waits twice stays held",
        "its id is never recycled",
        "core/line.py",
        "            self._residency.unhold(again)\n",
        "            pass\n",
        killer="test_policies.py: storage_is_back",
    ),
    Mutant(
        "a page that waits twice is taken twice",
        "one ticket pins it twice in one statement, and the books are wrong",
        "core/line.py",
        "        return waiting[np.sort(first)]\n",
        "        return waiting\n",
        killer="test_policies.py: storage_is_back",
    ),
]
