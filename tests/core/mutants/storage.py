"""Mutants of ``core/storage.py``."""

from __future__ import annotations

from . import Mutant

_WRITE = """        return self._call(
            "write",
            lambda store, keys, bodies: store.write(keys[::-1], bodies[::-1])[::-1],
            keys,
            bodies,
        )
"""

MUTANTS = [
    Mutant(
        "a store hears of heads first",
        "at its quota it recycles the head of a prompt, and what remains is of no use",
        "core/storage.py",
        "store.write(keys[::-1], bodies[::-1])[::-1]",
        "store.write(keys, bodies)",
        killer="test_transfer.py: page_by_page",
    ),
    Mutant(
        "answers to a write are told of the wrong pages",
        "what was not written is believed to be",
        "core/storage.py",
        "store.write(keys[::-1], bodies[::-1])[::-1]",
        "store.write(keys[::-1], bodies[::-1])",
        killer="test_storage.py: within_a_call",
    ),
    Mutant(
        "the first call of a write has the descendants",
        "if it is the only one that succeeds, storage has what nobody can use",
        "core/storage.py",
        _WRITE,
        """        return self._call(
            "write", lambda store, *both: store.write(*both), keys[::-1], bodies[::-1]
        )[::-1]
""",
        killer="test_storage.py: within_a_call",
    ),
    Mutant(
        "a call is as long as its ticket",
        "a stall or an error concerns thousands of records",
        "core/storage.py",
        "slice(start, start + CALL_RECORDS)",
        "slice(start, len(keys))",
        killer="test_storage.py: bounded_size",
    ),
    Mutant(
        "a store that panics is a fault of its lane",
        "what its calls before had written counts as lost",
        "core/storage.py",
        "except BaseException as error:  # also",
        "except Exception as error:  # also",
        killer="test_lanes.py: store_raises_ends",
    ),
    Mutant(
        "a ticket goes on when the breaker has opened",
        "each of its calls waits for a store that is gone",
        "core/storage.py",
        "            if self.breaker.open:\n                break\n",
        "",
        killer="test_storage.py: before_the_breaker",
    ),
    Mutant(
        "what a store raises is no failure",
        "a store that is gone is asked for ever",
        "core/storage.py",
        "                self._faults[verb] += 1\n                self.breaker.failure()\n",
        "                self._faults[verb] += 1\n",
        killer="test_storage.py: wrong_length and 0",
    ),
    Mutant(
        "what a store raises is not counted",
        "an operator does not see that it fails",
        "core/storage.py",
        "                self._faults[verb] += 1\n",
        "",
        killer="test_storage.py: wrong_length and 0",
    ),
    Mutant(
        "a success does not heal",
        "failures a day apart open the breaker",
        "core/storage.py",
        "                self.breaker.success()\n",
        "",
        killer="test_storage.py: a_success_between",
    ),
    Mutant(
        "one flag counts for all records",
        "what a store did not read is served",
        "core/storage.py",
        "flags[part] = np.reshape(answer, len(keys[part]))",
        "flags[part] = answer",
        killer="test_storage.py: wrong_length and 1",
    ),
    Mutant(
        "a call that hangs goes unnoticed",
        "every request waits for it",
        "core/storage.py",
        "            if now - since > self._stall_seconds:\n",
        "            if False:\n",
        killer="test_storage.py: takes_long_is_noticed",
    ),
    Mutant(
        "one stall counts with every look",
        "an operator sees thousands of stalls, and there was one",
        "core/storage.py",
        "                if not self.breaker.open:\n                    self._faults",
        "                if True:\n                    self._faults",
        killer="test_storage.py: takes_long_is_noticed",
    ),
    Mutant(
        "a call that ended hangs",
        "the breaker opens a while after each call",
        "core/storage.py",
        "                self._calling.pop(verb, None)\n",
        "                pass\n",
        killer="test_storage.py: takes_long_is_noticed",
    ),
    Mutant(
        "groups share their names",
        "one group's bytes are read as another's",
        "core/storage.py",
        "        mine = self._prints[group]\n",
        "        mine = self._prints[0]\n",
        killer="test_cache.py: everything_committed",
    ),
]
