"""Mutants of ``core/lookup.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "storage is asked for what memory has",
        "every hit in memory costs a question for each of its records",
        "core/lookup.py",
        "start + np.flatnonzero(~self._mask[g, start:end]) for g",
        "np.arange(start, end) for g",
        killer="test_lookup.py: asks_only_for",
    ),
    Mutant(
        "a lookup ends where a group has a gap that a hit may do without",
        "a prompt that storage has is computed",
        "core/lookup.py",
        "            if not self._mask[rule.vital, start:end].all():\n",
        "            if not self._mask[rule.whole, start:end].all():\n",
        killer="test_lookup.py: may_do_without",
    ),
    Mutant(
        "a lookup goes on behind a gap",
        "a long new prompt asks for thousands of records that are of no use",
        "core/lookup.py",
        "                break\n",
        "                pass\n",
        killer="test_lookup.py: long_probe",
    ),
    Mutant(
        "a lookup ends after one call",
        "of a long prompt the beginning is read, and the rest is computed",
        "core/lookup.py",
        "            if not self._mask[rule.vital, start:end].all():\n                break\n",
        "            break\n",
        killer="test_lookup.py: may_do_without",
    ),
    Mutant(
        "windows are asked for behind a gap",
        "records that no hit can use cost a question",
        "core/lookup.py",
        "        self._complete(storage, tails, 0, reach)\n",
        "        self._complete(storage, tails, 0, pages)\n",
        killer="test_lookup.py: first_gap",
    ),
    Mutant(
        "windows are not asked for",
        "no model with a window ever hits in storage",
        "core/lookup.py",
        "        self._complete(storage, tails, 0, reach)\n",
        "",
        killer="test_lookup.py: first_gap",
    ),
    Mutant(
        "every group gets the first one's answers",
        "a read is started of what storage has not",
        "core/lookup.py",
        "            self._mask[g, at], flags = flags[: len(at)], flags[len(at) :]\n",
        "            self._mask[g, at] = flags[: len(at)]\n",
        killer="test_lookup.py: may_do_without",
    ),
]
