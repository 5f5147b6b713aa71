"""Mutants of ``core/audit.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "a count forgets the waiting lines",
        "what waits to be saved is recycled after a mishap elsewhere",
        "core/audit.py",
        "        for pages in self._lines():\n            holds[pages] += 1\n",
        "",
    ),
    Mutant(
        "what a ticket moves is free as soon as its page lost it",
        "what comes back lands on somebody else's bytes",
        "core/audit.py",
        "slots[table.slot[tier, g, pages] != slots])\n",
        "slots[:0])\n",
        killer="test_mend.py: requests_go_on and (elsewhere or owner)",
    ),
    Mutant(
        "a ticket pins what its page has lost",
        "the books can never be right until it comes back",
        "core/audit.py",
        "+= table.slot[tier, g, pages] == slots\n",
        "+= 1\n",
        killer="test_mend.py: requests_go_on and (elsewhere or owner)",
    ),
    Mutant(
        "a prefetch pins what is gone",
        "the same, until its request is admitted or gone",
        "core/audit.py",
        "                (g, pages[residency.table.where(HOST, g, pages, Residence.LIVE)])\n",
        "                (g, pages)\n",
        killer="test_mend.py: prefetch_loses",
    ),
    Mutant(
        "a lease of a page that moved goes on",
        "it reads what somebody else wrote",
        "core/audit.py",
        "            self._leases.pop(lease.serial).end()\n",
        "            pass\n",
        killer="test_cache.py: page_has_moved",
    ),
]
