"""Mutants of ``core/lanes.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "tickets of storage are taken together",
        "the first of many requests waits for the reads of all",
        "core/lanes.py",
        "len(self._queue) if self._merges else 1",
        "len(self._queue)",
        killer="test_lanes.py: one_ticket_at_a_time",
    ),
    Mutant(
        "copies are made one by one",
        "many small copies take much longer than one",
        "core/lanes.py",
        "len(self._queue) if self._merges else 1",
        "1",
        killer="test_lanes.py: one_ticket_at_a_time",
    ),
    Mutant(
        "what comes back wakes nobody",
        "every stage of a hit waits for the next look at a clock",
        "core/lanes.py",
        "            listener.wake()\n",
        "            pass\n",
        killer="test_lanes.py: wakes_whoever_listens",
    ),
    Mutant(
        "a listener is woken before the job is there",
        "it looks, finds nothing, and sleeps on",
        "core/lanes.py",
        "        self._jobs.append(job)\n"
        "        if (listener := self._listener()) is not None:\n"
        "            listener.wake()\n",
        "        if (listener := self._listener()) is not None:\n"
        "            listener.wake()\n"
        "        self._jobs.append(job)\n",
        killer="test_lanes.py: wakes_whoever_listens",
    ),
    Mutant(
        "a listener that exits ends its lane",
        "nothing moves any more, and nobody is told",
        "core/lanes.py",
        '        except BaseException:\n            log.exception("the listener',
        '        except Exception:\n            log.exception("the listener',
        killer="test_lanes.py: exits_ends_no_inbox",
    ),
    Mutant(
        "what was taken back is carried out all the same",
        "a job that failed fills slots that are somebody else's by now",
        "core/lanes.py",
        "            self._queue.clear()\n",
        "",
        killer="test_lanes.py: have_not_begun",
    ),
    Mutant(
        "a lane that closes forgets its queue",
        "what a drain had started is not written",
        "core/lanes.py",
        "                if not self._queue:\n                    return\n",
        "                if self._closed:\n                    return\n",
        killer="test_lanes.py: one_ticket_at_a_time",
    ),
]
