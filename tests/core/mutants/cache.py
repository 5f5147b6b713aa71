"""Mutants of ``core/cache.py``."""

from __future__ import annotations

from . import Mutant

MUTANTS = [
    Mutant(
        "commit stamps new pages only",
        "the same: a generation grows newer than the prompt it needs",
        "core/cache.py",
        "        self.residency.stamp(lease.path)\n",
        "        self._table.used[:, lease.path[first:]] = self._table.tick()\n",
    ),
    Mutant(
        "hits are not counted",
        "a prefix that many share goes with the first long request that slid past it",
        "core/cache.py",
        "            self._count_hit(path)\n",
        "",
    ),
    Mutant(
        "release frees what a ticket fills",
        "the lane writes into somebody else's slot",
        "core/cache.py",
        "        path, shares = self._leases.pop(lease.serial).end()\n",
        "        path, shares = self._leases.pop(lease.serial).end()\n"
        "        for ticket in self.transfers.pending:\n"
        "            for move in ticket.moves if ticket.kind == LOAD else []:\n"
        "                self._device.drop(move.group, move.pages)\n",
    ),
    Mutant(
        "holds are given back twice",
        "a page is recycled under whoever else holds it",
        "core/cache.py",
        "            self.residency.unhold(path)\n",
        "            self.residency.unhold(path)\n            self.residency.unhold(path)\n",
    ),
    Mutant(
        "working slots leak",
        "the device is full of running states that nobody runs",
        "core/cache.py",
        "                    self._device.free(g, shares[group.name].working)\n",
        "",
    ),
    Mutant(
        "what breaks while copies are started is raised",
        "every tick, and with it every request",
        "core/cache.py",
        "            self._backup.advance()\n        except InvariantError:\n",
        "            self._backup.advance()\n        except ArithmeticError:\n",
        killer="test_mend.py: costs_its_page",
    ),
    Mutant(
        "a lease that breaks is kept",
        "what it had half done has an owner that knows nothing of it",
        "core/cache.py",
        "        self._audit.broke(lease.path)\n        self._leases.pop(lease.serial).end()\n",
        "        self._audit.broke(lease.path)\n",
        killer="test_mend.py: lease_that_breaks",
    ),
    Mutant(
        "who waited for a broken load goes on",
        "it says that it is ready, over slots that nobody filled",
        "core/cache.py",
        "                    if not waiter.released:\n"
        "                        self._leases.pop(waiter.serial).end()\n",
        "",
        killer="test_cache.py: broke_reads_nothing",
    ),
    Mutant(
        "a broken release is raised",
        "what it had not given back yet has no owner",
        "core/cache.py",
        "            self.residency.unhold(path)\n        except InvariantError:\n",
        "            self.residency.unhold(path)\n        except ArithmeticError:\n",
        killer="test_cache.py: release_that_breaks",
    ),
    Mutant(
        "a path that left the tree is committed below",
        "pages hang on a parent that nobody finds",
        "core/cache.py",
        "        if lease.detached:\n            return\n",
        "        lease.detached = False\n",
        killer="test_cache.py: left_the_tree",
    ),
    Mutant(
        "windows slide in grow",
        "a rejected draft does not find its window again",
        "core/cache.py",
        "                taken.append((g, share, had))\n",
        "                taken.append((g, share, had))\n"
        "                if group.tail is not None:\n"
        "                    start = min(lease.pages, group.needed(count).start)\n"
        "                    self._slots.slide(g, lease, start)\n",
    ),
    Mutant(
        "no snapshot where paths part",
        "a prefix that all share is computed by all",
        "core/cache.py",
        "ends = sorted({len(self._raw(tokens)) // self._tree.page_bytes, known})",
        "ends = [len(self._raw(tokens)) // self._tree.page_bytes]",
    ),
    Mutant(
        "a hit may use all tokens",
        "nothing is left to compute the next token from",
        "core/cache.py",
        "(len(tokens) - 1) // self.schema.page_tokens",
        "len(tokens) // self.schema.page_tokens",
    ),
    Mutant(
        "a refused grow keeps its slots",
        "grow is all or nothing, in every group",
        "core/cache.py",
        "                    self._slots.let_go(group_index, shared, lease.path, size)\n",
        "                    pass\n",
    ),
    Mutant(
        "requests wait for storage that is out of order",
        "one call that hangs stops all who come",
        "core/cache.py",
        "prefetch.done or self.transfers.breaker.open",
        "prefetch.done",
        killer="test_cache.py: go_on_without_a_store and read",
        slow=True,
    ),
    Mutant(
        "storage does not hear of hits in memory",
        "it recycles first what is used most, and a restart finds nothing",
        "core/cache.py",
        "            self._touch_storage(path)\n",
        "",
    ),
    Mutant(
        "storage hears of ancestors first",
        "it recycles the root before the leaf",
        "core/cache.py",
        "pages = path[group.needed(len(path)).start :][::-1]",
        "pages = path[group.needed(len(path)).start :]",
        killer="test_cache.py: storage_hears",
    ),
    Mutant(
        "a drain leaves what is on the device",
        "a restart does not find it",
        "core/cache.py",
        "        self._backup.flush()\n",
        "",
        killer="test_policies.py: a_close_under",
    ),
    Mutant(
        "hits count where they end",
        "an ancestor is hit less often than its descendants, so it goes first",
        "core/cache.py",
        "        self._table.reused[path] += 1\n",
        "        self._table.reused[path[-1:]] += 1\n",
        killer="test_policies.py: lfu_keeps or leaf_first",
    ),
    Mutant(
        "a drain takes an outage for rest",
        "a cache is closed before its store was tried again",
        "core/cache.py",
        "while self._backup.waiting or not self.idle:",
        "while not self.idle:",
        killer="test_policies.py: tried_twice",
    ),
    Mutant(
        "a drain waits for storage that is gone",
        "a server takes half a minute to end",
        "core/cache.py",
        " or (breaker.open and breaker.trips > trips + 1)",
        "",
        killer="test_policies.py: tried_twice",
    ),
    Mutant(
        "a drain gives storage up at once",
        "what comes back in a moment gets nothing",
        "core/cache.py",
        "breaker.trips > trips + 1",
        "breaker.trips > trips",
        killer="test_policies.py: tried_twice",
    ),
    Mutant(
        "a drain waits until a breaker lets it try",
        "that may be a minute, and nobody waits so long",
        "core/cache.py",
        "        breaker.retry()\n",
        "",
        killer="test_policies.py: tried_twice",
    ),
    Mutant(
        "a drain tries again before it knows what failed",
        "what came back just now counts as refused, and is given up",
        "core/cache.py",
        "        self.tick()  # what has failed is in line again before storage is tried again\n",
        "",
        killer="test_policies.py: tried_twice",
    ),
]
