"""Mutants of ``core/transfer.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "what loads faster is computed",
        "load or recompute, the wrong way round",
        "core/transfer.py",
        "computing < seconds",
        "computing > seconds",
        killer="test_recompute.py: computes_faster",
    ),
    Mutant(
        "everything is loaded",
        "requests wait for a store that is slower than computing",
        "core/transfer.py",
        "computing < seconds",
        "computing < 0 * seconds",
        killer="test_recompute.py: computes_faster",
    ),
    Mutant(
        "measured speeds count though they must not",
        "an operator who says never gets recomputed prompts",
        "core/transfer.py",
        'self.prefill.seconds(tokens) if self._policy.recompute == "auto" else None',
        "self.prefill.seconds(tokens)",
        killer="test_recompute.py: faster_is_not_read",
    ),
    Mutant(
        "a stall keeps its queue",
        "who queues behind a call that hangs, hangs too",
        "core/transfer.py",
        "            self._fail_behind[verb]()\n",
        "            pass\n",
        killer="test_transfer.py: is_given_up",
    ),
    Mutant(
        "a transfer that storage refuses never comes back",
        "its pages stay pinned, and a drain never ends",
        "core/transfer.py",
        "            ticket.fail()\n            self._landed.put(ticket)\n",
        "            ticket.fail()\n",
        killer="test_storage.py: means_no_storage",
    ),
    Mutant(
        "a question that storage refuses never comes back",
        "its prompt waits for an answer that nobody gives",
        "core/transfer.py",
        "            inquiry.fail()\n            self._answered.put(inquiry)\n",
        "            inquiry.fail()\n",
        killer="test_transfer.py: question_that_storage_cannot",
    ),
    Mutant(
        "a job that was given up is not reported",
        "the slots that it was to fill are never free again",
        "core/transfer.py",
        "        job.fail()\n        inbox.put(job)\n",
        "        job.fail()\n",
        killer="test_transfer.py: is_given_up",
    ),
    Mutant(
        "answers are not counted",
        "a cache whose questions were all answered never rests",
        "core/transfer.py",
        "                self._asked.remove(inquiry)\n",
        "                pass\n",
        killer="test_cache.py: nobody_waits_for_any_more",
    ),
    Mutant(
        "what waits in the lane takes no time",
        "each of many requests believes that it is the only one",
        "core/transfer.py",
        "size + max(self.behind(route).values(), default=0)",
        "size",
        killer="test_recompute.py: waits_before_it",
    ),
    Mutant(
        "what is not going to be read takes time",
        "the next prompt is computed, though its read would be fast",
        "core/transfer.py",
        "accumulate(0 if ticket.abandoned else ticket.left for",
        "accumulate(ticket.left for",
        killer="test_transfer.py: abandoned",
    ),
    Mutant(
        "a trial does not count until it is back",
        "every request that comes meanwhile tries the slow store, too",
        "core/transfer.py",
        "            self.speeds[route].tried()\n",
        "            pass\n",
        killer="test_recompute.py: tries_a_slow",
    ),
    Mutant(
        "a short prompt is read in many calls",
        "the calls cost more than the bytes",
        "core/transfer.py",
        "max(_READ_SHARE * total, _READ_LEAST / pace)",
        "_READ_SHARE * total",
        killer="test_transfer.py: not_too_short",
    ),
]
