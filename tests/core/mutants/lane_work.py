"""Mutants of ``core/lane_work.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "a partial read is published whole",
        "wrong bytes reach a model",
        "core/lane_work.py",
        "            move.landed = flags[start : start + len(move.pages)]\n",
        "            move.landed = flags[start : start + len(move.pages)] | flags.any()\n",
        killer="test_cache.py: record_that_is_gone",
    ),
    Mutant(
        "every group of a ticket gets the first one's flags",
        "a page is served of which one group was not read",
        "core/lane_work.py",
        "            start += len(move.pages)\n",
        "",
        killer="test_cache.py: record_that_is_gone",
    ),
    Mutant(
        "an exception ends a lane",
        "nothing moves any more, and nobody is told",
        "core/lane_work.py",
        "            except BaseException as error:\n",
        "            except ZeroDivisionError as error:\n",
        killer="test_cache.py: load_that_fails_shortens",
    ),
    Mutant(
        "what a lane raised is not counted",
        "an operator does not see that copies fail",
        "core/lane_work.py",
        "                self._faults[name] += 1\n",
        "",
        killer="test_transfer.py: copy_that_raises",
    ),
    Mutant(
        "what a lane raised fails nothing",
        "jobs come back with no outcome, and break whoever applies them",
        "core/lane_work.py",
        "                for job in batch:\n                    job.fail()\n",
        "",
        killer="test_cache.py: load_that_fails_shortens",
    ),
    Mutant(
        "a read that nobody waits for is made",
        "a slow store is busy with it when it is asked for something better",
        "core/lane_work.py",
        "            if ticket.abandoned:\n",
        "            if False:\n",
        killer="test_cache.py: nobody_waits_for_any_more",
    ),
    Mutant(
        "groups are written one after the other",
        "a store that runs full keeps one group of each page, and no hit",
        "core/lane_work.py",
        'np.argsort(np.concatenate(places), kind="stable").tolist()',
        "list(range(sum(map(len, places))))",
        killer="test_transfer.py: page_by_page",
    ),
    Mutant(
        "answers to a write go by its order",
        "what was not written is believed to be",
        "core/lane_work.py",
        "            flags[order] = self._storage.write(",
        "            flags[:] = self._storage.write(",
        killer="test_transfer.py: what_became_of_it",
    ),
    Mutant(
        "of tickets that are merged only the last is copied",
        "wrong bytes reach a model",
        "core/lane_work.py",
        "            merged.setdefault(move.group, []).append(move)\n",
        "            merged[move.group] = [move]\n",
        killer="test_transfer.py: moved_as_one",
    ),
    Mutant(
        "loads wait on the clock",
        "a load behind a long step is taken for slow, and the next hit is computed",
        "core/lane_work.py",
        "        with self.speeds[LOAD].under_way(size):\n",
        "        for ticket in batch:\n            ticket.after.synchronize()\n"
        "        with self.speeds[LOAD].under_way(size):\n",
        killer="test_transfer.py: does_first",
    ),
    Mutant(
        "records that were not there count as read",
        "a store that lacks what it seems to have looks fast, and prompts wait for it",
        "core/lane_work.py",
        "            speed.observe(self._land(ticket, flags), seconds)",
        "            self._land(ticket, flags)\n            speed.observe(ticket.left, seconds)",
        killer="test_transfer.py: not_there_tells_no_speed",
    ),
    Mutant(
        "a question that failed is not finished",
        "its request waits for an answer that nobody gives",
        "core/lane_work.py",
        "    def fail(self) -> None: ...\n",
        "    def fail(self) -> None:\n        self.finish = lambda: None\n",
        killer="test_prefetch.py: question_that_was_given_up",
    ),
]
