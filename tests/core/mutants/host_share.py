"""Mutants of ``core/host_share.py``."""

from __future__ import annotations

from . import Mutant

_USERS = """        users = self._table.kept[group]
        before = users[pages]
        self._used[group] += len(pages) - int(np.count_nonzero(before))
        users[pages] = before + 1

    def give_back(self, group: int, pages: Ids) -> None:
        \"\"\"Count one prefetch less that keeps these.\"\"\"
        users = self._table.kept[group]
        after = users[pages] - 1
        self._used[group] -= len(pages) - int(np.count_nonzero(after))
        users[pages] = after

    def loose(self, group: int, pages: Ids) -> int:
        \"\"\"How many of these pages no prefetch keeps.\"\"\"
        return len(pages) - int(np.count_nonzero(self._table.kept[group][pages]))
"""

MUTANTS = [
    Mutant(
        "prefetches may keep all of the host",
        "nothing can be saved to it while they wait",
        "core/host_share.py",
        "[int(share * slots) for slots",
        "[slots for slots",
        killer="test_cache.py: share_a_part",
    ),
    Mutant(
        "what two prefetches keep counts twice",
        "requests with one prompt wait for each other",
        "core/host_share.py",
        "        self._used[group] += len(pages) - int(np.count_nonzero(before))\n",
        "        self._used[group] += len(pages)\n",
        killer="test_host_share.py: counts_once",
    ),
    Mutant(
        "what another still keeps is free",
        "prefetches keep more of the host than their share",
        "core/host_share.py",
        "        self._used[group] -= len(pages) - int(np.count_nonzero(after))\n",
        "        self._used[group] -= len(pages)\n",
        killer="test_host_share.py: counts_once",
    ),
    Mutant(
        "who keeps a page is not forgotten",
        "the next one that keeps it takes nothing of the share",
        "core/host_share.py",
        "        users[pages] = after\n",
        "",
        killer="test_host_share.py: counts_once",
    ),
    Mutant(
        "what others keep would count again",
        "a request waits for room that it does not need",
        "core/host_share.py",
        "        return len(pages) - int(np.count_nonzero(self._table.kept[group][pages]))\n",
        "        return len(pages)\n",
        killer="test_host_share.py: counts_once",
    ),
    Mutant(
        "a page table that grows forgets who keeps what",
        "what is given back was never kept, and the share is counted wrongly from then on",
        "core/pages.py",
        "        self.slot[..., old:] = NO_SLOT\n",
        "        self.slot[..., old:] = NO_SLOT\n        self.kept[:] = 0\n",
        killer="test_host_share.py: grows",
    ),
    Mutant(
        "a new count keeps the old one",
        "after damage prefetches wait for room that nobody has",
        "core/host_share.py",
        "        self._used = [0] * len(self._most)\n",
        '        self._used = getattr(self, "_used", [0] * len(self._most))\n',
        killer="test_host_share.py: counted_anew",
    ),
    Mutant(
        "groups have one share between them",
        "a group that is small lets in more than fits, and one that is large waits",
        "core/host_share.py",
        _USERS,
        _USERS.replace("kept[group]", "kept[0]"),
        killer="test_host_share.py: groups",
    ),
]
