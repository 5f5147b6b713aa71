"""Mutants of ``core/audit.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "a count forgets the waiting lines",
        "a page that waits to be saved is recycled after a mishap elsewhere",
        "core/audit.py",
        "        for line in self._lines:\n"
        "            for entries in line.entries:\n"
        "                for pages in entries:\n"
        "                    holds[pages] += 1\n",
        "",
        killer="test_policies.py: waits_for_storage_waits",
    ),
    Mutant(
        "what a ticket moves is free as soon as its page lost it",
        "what comes back lands on somebody else's bytes",
        "core/audit.py",
        "slots[table.slot[tier, move.group, move.pages] != slots])\n",
        "slots[:0])\n",
        killer="test_mend.py: requests_go_on and (elsewhere or owner)",
    ),
    Mutant(
        "a ticket pins what its page has lost",
        "the books can never be right until it comes back",
        "core/audit.py",
        "+= table.slot[at] == slots\n",
        "+= 1\n",
        killer="test_mend.py: requests_go_on and (elsewhere or owner)",
    ),
    Mutant(
        "a prefetch pins what is gone",
        "the books can never be right until its request is admitted or gone",
        "core/audit.py",
        "                (g, pages[residency.table.where(HOST, g, pages, Residence.LIVE)])\n",
        "                (g, pages)\n",
        killer="test_mend.py: prefetch_loses",
    ),
    Mutant(
        "a lease of a page that moved goes on",
        "it reads what somebody else wrote",
        "core/audit.py",
        "                del self.leases[lease.serial]\n                lease.end()\n",
        "                pass\n",
        killer="test_cache.py: page_has_moved",
    ),
    Mutant(
        "who waits for a load that broke goes on waiting",
        "its request is never run",
        "core/audit.py",
        " or any(one not in arrivals for one in lease.arriving):\n",
        ":\n",
        killer="test_cache.py: broke_reads_nothing",
    ),
    Mutant(
        "who waits for a read that broke goes on waiting",
        "its request is never scheduled",
        "core/audit.py",
        "            prefetch.forsake(self._tickets)\n",
        "",
        killer="test_cache.py: bookkeeping_costs and read",
    ),
    Mutant(
        "a lease that an interrupt broke is not ended",
        "its caller goes on with slots that the books give to others",
        "core/audit.py",
        "        if lease is not None:\n            pages = ",
        "        if lease is not None and isinstance(error, InvariantError):\n            pages = ",
        killer="test_interrupts.py: mended and commit",
    ),
    Mutant(
        "a broken lease goes on with its slots",
        "it writes to slots that are free by now",
        "core/audit.py",
        "            self.leases.pop(lease.serial, None)\n            lease.end()\n",
        "            self.leases.pop(lease.serial, None)\n",
        killer="test_mend.py: lease_that_breaks",
    ),
    Mutant(
        "an interrupt is swallowed",
        "a server that is asked to stop goes on, and counts an error of its books",
        "core/audit.py",
        "        contained = isinstance(error, InvariantError)\n",
        "        contained = True\n",
        killer="test_interrupts.py: mended and release and not loading",
    ),
    Mutant(
        "an interrupt leaves the books as they are",
        "what it cut in two leaks, or is owned twice",
        "core/audit.py",
        "        self._broken += [NO_IDS, *(pages if contained else ())]\n",
        "        self._broken += pages if contained else ()\n",
        killer="test_interrupts.py: mended and release and not loading",
    ),
    Mutant(
        "pages that broke stay",
        "they are served, and break the next request in the same way",
        "core/audit.py",
        "        self._broken += [NO_IDS, *(pages if contained else ())]\n",
        "        self._broken += [NO_IDS]\n",
        killer="test_mend.py: broke_are_dropped",
    ),
    Mutant(
        "what broke is mended in every call from then on",
        "new pages that got the ids of broken ones are dropped, too",
        "core/audit.py",
        "        self._broken.clear()\n",
        "",
        killer="test_mend.py: broke_are_dropped",
    ),
    Mutant(
        "a new count of the share forgets reads under way",
        "prefetches take more of the host than they may",
        "core/audit.py",
        "        self._share.reset([*kept, *((move.group, move.pages) for move in reads)])\n",
        "        self._share.reset(kept)\n",
        killer="test_prefetch.py: after_damage",
    ),
    Mutant(
        "the share of the host is not counted anew",
        "prefetches wait for room that a broken one has left",
        "core/audit.py",
        "        self._share.reset([*kept, *((move.group, move.pages) for move in reads)])\n",
        "",
        killer="test_prefetch.py: lost_is_free",
    ),
]
