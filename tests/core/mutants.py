"""Mistakes that the tests must find: each one was made, or nearly made, by somebody.

A mutant is an exact replacement in one file of the core or of the file store. ``killer`` is what
must find it: "walk", or a test module, seen from here, and an expression for ``pytest -k``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    why: str  # it is wrong
    file: str  # of src/kvkeep
    old: str
    new: str
    killer: str = "walk"
    slow: bool = False  # to be found; left out by default


MUTANTS = [
    # --- clocks and eviction
    Mutant(
        "landing stamps",
        "a child becomes newer than its ancestor, so the ancestor goes first",
        "loading.py",
        "            self._device.publish(move.group, move.pages[move.landed])\n",
        "            self._device.publish(move.group, move.pages[move.landed])\n"
        "            clock = self._table.clocks[move.group]\n"
        "            self._table.used[clock, move.pages] = self._table.tick()\n",
    ),
    Mutant(
        "commit stamps new pages only",
        "the same: a generation grows newer than the prompt it needs",
        "cache.py",
        "        self.residency.stamp(lease.path)\n",
        "        self._table.used[:, lease.path[first:]] = self._table.tick()\n",
    ),
    Mutant(
        "pages that slid by stay warm",
        "a long request's dead window pages outlive idle sessions' useful tails",
        "slots.py",
        "= 0\n        self._",
        "= self._table.clock\n        self._",
    ),
    Mutant(
        "eviction ignores depth",
        "among pages of one clock the root goes before the leaf",
        "policy.py",
        "((1 << _DEPTH_BITS) - 1 - table.depth[ids])",
        "table.depth[ids]",
    ),
    Mutant(
        "eviction ignores pins",
        "a slot goes while a request or a lane uses it",
        "tier.py",
        "        fit &= table.pins[self.index, group][pages] == 0\n",
        "",
    ),
    Mutant(
        "victims are not checked again",
        "a page that was used since it was chosen goes all the same",
        "tier.py",
        "            good &= self._key(pages) == keys\n",
        "",
        killer="test_tier.py: used_since",
    ),
    Mutant(
        "late comers wait for the next batch",
        "an old page that was pinned outlives newer ones",
        "tier.py",
        "late = keys <= self._horizon",
        "late = keys < 0",
        killer="test_tier.py: late_comers",
    ),
    Mutant(
        "hits are not counted",
        "a prefix that many share goes with the first long request that slid past it",
        "cache.py",
        "            self._count_hit(path)\n",
        "",
    ),
    Mutant(
        "one hit keeps a window",
        "every turn of every conversation is kept, and none is whole",
        "pages.py",
        "MANY = 2",
        "MANY = 1",
    ),
    # --- who owns what
    Mutant(
        "release frees what a ticket fills",
        "the lane writes into somebody else's slot",
        "cache.py",
        "        lease.released = True\n",
        "        lease.released = True\n"
        "        for ticket in self.transfers.pending:\n"
        "            for move in ticket.moves if ticket.kind == LOAD else []:\n"
        "                self._device.drop(move.group, move.pages)\n",
    ),
    Mutant(
        "cancel frees what a ticket fills",
        "a late read lands in somebody else's slot",
        "prefetch.py",
        "        prefetch.closed = prefetch.done = True\n",
        "        prefetch.closed = prefetch.done = True\n"
        "        for ticket in self._transfers.pending:\n"
        "            for move in ticket.moves if prefetch in ticket.waiters else []:\n"
        "                if len(move.pages):\n"
        "                    self._residency.host.drop(move.group, move.pages)\n",
        killer="test_cache.py: cancelled_prefetch",
    ),
    Mutant(
        "a late read is pinned for a closed prefetch",
        "nobody takes the pin back",
        "prefetch.py",
        "                if not prefetch.closed:\n                    self._pin",
        "                if True:\n                    self._pin",
        killer="test_cache.py: cancelled_prefetch",
    ),
    Mutant(
        "ids are recycled while held",
        "a page retired in mid-flight comes back as another page under its ticket",
        "residency.py",
        "table.dying[ids] & (table.holds[ids] == 0)",
        "table.dying[ids]",
    ),
    Mutant(
        "a page is retired under its copy",
        "a lane fills a slot that is somebody else's by now",
        "residency.py",
        "        self._reap(gone)\n",
        "        for tier in (self.device, self.host):\n"
        "            for group in range(len(self.schema.groups)):\n"
        "                idle = table.pins[tier.index, group][gone] == 0\n"
        "                idle &= table.slot[tier.index, group][gone] != NO_SLOT\n"
        "                tier.drop(group, gone[idle])\n"
        "        self._reap(gone)\n",
    ),
    Mutant(
        "only first pages are retired",
        "what is below stays in the tree, and serves a hit that has no bytes",
        "residency.py",
        "(above < 0) | ~table.dying[above]",
        "above < 0",
    ),
    Mutant(
        "a page does not know the one before",
        "a path that nothing is left of is trimmed down to where a request began",
        "pages.py",
        "path[-1] if len(path) else -1",
        "-1",
        killer="test_pages.py: know_depth",
    ),
    Mutant(
        "a second unpin frees a slot",
        "a scheduler is told of room that is in use",
        "tier.py",
        "self._busy[group] -= len(pages) - count(after)",
        "self._busy[group] -= len(pages)",
    ),
    Mutant(
        "late comers are merged by page",
        "an old page that was pinned outlives newer ones",
        "tier.py",
        "np.lexsort((pages, keys))",
        "np.lexsort((keys, pages))",
        killer="test_tier.py: late_comers or goes_first",
    ),
    Mutant(
        "a recycled id keeps its past",
        "a fresh page has another's clocks and hints",
        "pages.py",
        "            row[ids] = _COLUMNS[name][1]\n",
        "            pass\n",
    ),
    Mutant(
        "holds are given back twice",
        "a page is recycled under whoever else holds it",
        "cache.py",
        "share.working)\n        self.residency.unhold(lease.path)\n",
        "share.working)\n        self.residency.unhold(lease.path)\n"
        "        self.residency.unhold(lease.path)\n",
    ),
    Mutant(
        "loading does not pin its source",
        "the host evicts what is being copied from it",
        "slots.py",
        "            self._host.pin(g, load)\n",
        "",
    ),
    Mutant(
        "saving does not pin its source",
        "the device evicts what is being copied from it",
        "backup.py",
        "source = residency.device.pin(group, ready)",
        "source = table.slot[DEVICE, group, ready]",
    ),
    Mutant(
        "a waiting request pins the device",
        "requests that wait starve those that run",
        "prefetch.py",
        "                self._pin(prefetch, group, live)\n",
        "                self._pin(prefetch, group, live)\n"
        "                here = table.where(0, group, path, Residence.LIVE)\n"
        "                residency.device.pin(group, path[here])\n",
    ),
    Mutant(
        "working slots leak",
        "the device is full of running states that nobody runs",
        "cache.py",
        "                self._device.free(g, share.working)\n",
        "",
    ),
    Mutant(
        "a count forgets the waiting lines",
        "what waits to be saved is recycled after a mishap elsewhere",
        "audit.py",
        "    for pages in lines:\n        holds[pages] += 1\n",
        "",
    ),
    Mutant(
        "a broken row is not contained",
        "one page's damage ends the scheduler",
        "residency.py",
        "table.slot[tier.index, group][over] != NO_SLOT",
        "table.state[tier.index, group][over] != 0",
        killer="test_cache.py: broken_bookkeeping and load",
    ),
    # --- commit
    Mutant(
        "duplicates are kept",
        "two requests with one prompt hold it twice",
        "slots.py",
        "at[state == _ABSENT], at[state == _LIVE]",
        "at[state == _ABSENT], at[:0]",
    ),
    Mutant(
        "duplicates are neither adopted nor pinned",
        "what is computed serves nobody else",
        "slots.py",
        "        state = self._table.state[DEVICE, g][path[at]]\n",
        "        at = at[:0]\n        state = self._table.state[DEVICE, g][path[at]]\n",
    ),
    Mutant(
        "commit does not repoint",
        "the lease goes on reading the slot that it has just freed",
        "slots.py",
        "        share.slots[settled] = self._device.pin(g, path[settled])\n",
        "        self._device.pin(g, path[settled])\n",
    ),
    Mutant(
        "a duplicate's own slot is not freed",
        "the device leaks a slot for each page computed twice",
        "slots.py",
        "            self._device.free(g, share.slots[known])\n",
        "            pass\n",
    ),
    Mutant(
        "a path that left the tree is committed below",
        "pages hang on a parent that nobody finds",
        "cache.py",
        "        if lease.detached:\n            return\n",
        "        lease.detached = False\n",
        killer="test_cache.py: left_the_tree",
    ),
    Mutant(
        "windows slide in grow",
        "a rejected draft does not find its window again",
        "cache.py",
        "            taken.append((g, share, had))\n        return True\n",
        "            taken.append((g, share, had))\n"
        "            if group.tail is not None:\n"
        "                start = min(lease.pages, group.needed(count).start)\n"
        "                self._slots.slide(g, lease, start)\n"
        "        return True\n",
    ),
    # --- snapshots
    Mutant(
        "a snapshot is published that was not taken",
        "a hit starts from whatever the slot held",
        "slots.py",
        "            at = at[np.isin(at, list(snapshots))]\n",
        "            pass\n",
    ),
    Mutant(
        "snapshots that hits will end at go first",
        "the next turn of a conversation finds nothing to start from",
        "slots.py",
        "            dead &= ~np.isin(ends, list(lease.lasting))\n",
        "            pass\n",
    ),
    Mutant(
        "no snapshot where paths part",
        "a prefix that all share is computed by all",
        "cache.py",
        "ends = sorted({len(self._raw(tokens)) // self._tree.page_bytes, known})",
        "ends = [len(self._raw(tokens)) // self._tree.page_bytes]",
    ),
    Mutant(
        "no interim snapshots",
        "a request that is preempted starts again from its prompt",
        "slots.py",
        "if every and any(",
        "if False and any(",
    ),
    Mutant(
        "a snapshot must have room",
        "requests are refused for want of a luxury",
        "slots.py",
        "            if not group.working:\n                return False\n",
        "            return False\n",
    ),
    Mutant(
        "working slots are taken before the hit is pinned",
        "a request evicts the very snapshot that it needs",
        "slots.py",
        "            self.pin(g, share, live)  #",
        "            self._residency.make_room(self._device, g, group.working)\n"
        "            live = live[self._table.where(DEVICE, g, live, Residence.LIVE)]\n"
        "            self.pin(g, share, live)  #",
        killer="test_cache.py: do_not_cost",
    ),
    # --- admit and grow
    Mutant(
        "a hit may use all tokens",
        "nothing is left to compute the next token from",
        "cache.py",
        "(len(tokens) - 1) // self.schema.page_tokens",
        "len(tokens) // self.schema.page_tokens",
    ),
    Mutant(
        "a refused request keeps its slots",
        "admit is all or nothing",
        "slots.py",
        "            self._device.free(move.group, move.target)\n",
        "",
        killer="test_cache.py: refused_load",
    ),
    Mutant(
        "a refused grow keeps its slots",
        "grow is all or nothing, in every group",
        "cache.py",
        "                    self._slots.let_go(group_index, shared, lease.path, size)\n",
        "                    pass\n",
    ),
    Mutant(
        "loads under way are not joined",
        "a lease is ready while its pages are on their way",
        "loading.py",
        "if ticket.kind == LOAD and ticket.touches(lease.path):",
        "if False:",
        killer="test_cache.py: 64_requests",
    ),
    Mutant(
        "the hit rule is not run again after a failed load",
        "a request runs on pages that are not there",
        "loading.py",
        "        if pages < lease.pages:\n            lease.explanation",
        "        if False:\n            lease.explanation",
        killer="test_cache.py: load_that_fails_shortens",
    ),
    Mutant(
        "a hit is judged by what the lease waited for alone",
        "pages that somebody else brought meanwhile are thrown away",
        "loading.py",
        "            | self._table.where(DEVICE, g, lease.path, Residence.LIVE)\n",
        "",
        killer="test_cache.py: there_at_last",
    ),
    Mutant(
        "requests wait for storage that is out of order",
        "one call that hangs stops all who come",
        "cache.py",
        "prefetch.done or self.transfers.breaker.open",
        "prefetch.done",
        killer="test_cache.py: go_on_without_a_store and read",
        slow=True,
    ),
    Mutant(
        "a lenient hit reads before its gap",
        "missing rows are masked, never read",
        "slots.py",
        "share.valid_from = int(gaps[-1]) + 1\n            ids",
        "share.valid_from = int(gaps[-1])\n            ids",
        killer="test_cache.py: missing_optional",
    ),
    Mutant(
        "storage does not hear of hits in memory",
        "it recycles first what is used most, and a restart finds nothing",
        "cache.py",
        "            self._touch_storage(path)\n",
        "",
    ),
    Mutant(
        "storage hears of ancestors first",
        "it recycles the root before the leaf",
        "cache.py",
        "pages = path[group.needed(len(path)).start :][::-1]",
        "pages = path[group.needed(len(path)).start :]",
        killer="test_cache.py: storage_hears",
    ),
    # --- the hit rule, keys and the tree
    Mutant(
        "a window is one page",
        "the first token after a hit attends to what is not there",
        "schema.py",
        "max(0, pages - self.tail)",
        "max(0, pages - 1)",
    ),
    Mutant(
        "a hit ends at the first gap",
        "a window's gap far back ends a hit that does not need it",
        "schema.py",
        "int(np.flatnonzero(fits)[-1])",
        "int(np.cumprod(fits).sum()) - 1",
    ),
    Mutant(
        "keys do not chain",
        "two prompts with one page in common share its state",
        "schema.py",
        "hashlib.sha256(parent)",
        "hashlib.sha256()",
    ),
    Mutant(
        "namespaces share their keys",
        "one tenant reads another's state from storage",
        "schema.py",
        "name = namespace.encode()",
        'name = b""',
    ),
    Mutant(
        "namespaces share a root",
        "one tenant reads another's state from memory",
        "tree.py",
        "root = self._roots.get(namespace)",
        "root = next(iter(self._roots.values()), None)",
    ),
    Mutant(
        "half a page matches",
        "pages are shared whole",
        "tree.py",
        "count = _common(node.raw, at * size, part) // size\n",
        "count = -(-_common(node.raw, at * size, part) // size)\n",
        slow=True,
    ),
    Mutant(
        "a split forgets who moved",
        "pages below the fork point at the node above it",
        "tree.py",
        "low}\n        self._assign(ids, low)\n",
        "low}\n",
        slow=True,
    ),
    Mutant(
        "a cut leaves what is below",
        "pages that no hit can use keep their slots",
        "tree.py",
        "removed += [kid.ids for kid in _descendants(node)]",
        "pass",
        killer="test_tree.py: cut_takes",
    ),
    Mutant(
        "an evicted page stays in the tree",
        "all that is below keeps slots and serves no hit",
        "residency.py",
        "        pages = tier.evict(group, count)\n        self._end(group, pages)\n",
        "        pages = tier.evict(group, count)\n",
    ),
    Mutant(
        "a path without slots is not trimmed",
        "where no group needs every page, the tree grows forever",
        "residency.py",
        "        elif self._trims:\n            self._trim(pages)\n",
        "",
        slow=True,
    ),
    Mutant(
        "what was held is not trimmed",
        "the same, through requests that came to nothing",
        "residency.py",
        "        if self._trims:\n            self._trim(ids)\n",
        "",
        slow=True,
    ),
    Mutant(
        "a cut merges and tells no page",
        "pages point at a node that is not in the tree",
        "tree.py",
        "            self._assign(kid.ids, parent)\n",
        "",
        slow=True,
    ),
    # --- transfers
    Mutant(
        "a partial read is published whole",
        "wrong bytes reach a model",
        "transfer.py",
        "            move.landed = flags[start : start + len(move.pages)]\n",
        "            move.landed = flags[start : start + len(move.pages)] | flags.any()\n",
        killer="test_cache.py: record_that_is_gone",
    ),
    Mutant(
        "what failed has landed",
        "wrong bytes reach a model",
        "transfer.py",
        "            move.landed = np.zeros(len(move.pages), dtype=bool)\n",
        "            move.landed = np.ones(len(move.pages), dtype=bool)\n",
    ),
    Mutant(
        "reads under way are not joined",
        "64 requests with one prefix read it 64 times",
        "prefetch.py",
        "self._pad(table.resident(g, path), pages)",
        "self._pad((table.state[:, g, path] == 2).any(axis=0), pages)",
        killer="test_cache.py: 64_requests",
    ),
    Mutant(
        "a joined read is not waited for",
        "the second of two requests computes what the first is reading",
        "prefetch.py",
        "                self._wait(prefetch, other)\n",
        "                pass\n",
        killer="test_cache.py: joins_a_read",
    ),
    Mutant(
        "a prefetch evicts its own path",
        "it hangs pages on a parent that it has just dropped, and the scheduler ends",
        "prefetch.py",
        "                residency.host.pin(group, live)\n"
        "                loose.append((group, live))\n",
        "                pass\n",
        killer="test_cache.py: own_path",
    ),
    Mutant(
        "a prefetch's share of the host is never given back",
        "prefetches wait forever",
        "prefetch.py",
        "            self._claimed[group] -= count\n",
        "            pass\n",
        killer="test_cache.py: share_a_part",
    ),
    Mutant(
        "only the last page is written through",
        "what survives a restart has no ancestors, and is of no use",
        "backup.py",
        '        """These were committed."""\n',
        '        """These were committed."""\n        pages = pages[-1:]\n',
    ),
    Mutant(
        "the breaker never opens",
        "every request waits for a store that is gone",
        "transfer.py",
        "if (trip or self._failures >= self._limit) and not self.open:",
        "if False:",
        killer="test_transfer.py: left_alone or failures_in_a_row",
    ),
    Mutant(
        "an exception ends a lane",
        "nothing moves any more, and nobody is told",
        "transfer.py",
        '            except Exception as error:\n                log.warning("%s failed',
        '            except ZeroDivisionError as error:\n                log.warning("%s failed',
        killer="test_transfer.py: copy_that_raises and save",
        slow=True,
    ),
    Mutant(
        "a stall keeps its queue",
        "who queues behind a call that hangs, hangs too",
        "transfer.py",
        "self._lanes[_LANE_OF.get(kind, kind)].withdraw()",
        "[]",
        killer="test_transfer.py: hangs_trips",
        slow=True,
    ),
    # --- bytes
    Mutant(
        "components lie over each other",
        "a record has the last component's bytes only",
        "media/memory.py",
        "                start = end\n",
        "",
        killer="test_memory.py: contiguous",
        slow=True,
    ),
    Mutant(
        "a load reads where it should write",
        "a page comes back from a slot of the same number",
        "media/memory.py",
        "self.arenas[group][:, part].index_select(0, src)",
        "self.arenas[group][:, part].index_select(0, dst)",
        killer="test_memory.py: round_trip and BF16",
        slow=True,
    ),
    # --- the file store
    Mutant(
        "quarantine without compare and delete",
        "readers clear each other's good slots",
        "stores/index.py",
        '            " AND page = :page AND sequence = :sequence",\n',
        '            "",\n',
        killer="../test_file_store.py: cleared_only_as_it_was_seen",
    ),
    Mutant(
        "a transaction begins with a read",
        "two processes decide on the same slot",
        "stores/index.py",
        '"BEGIN IMMEDIATE"',
        '"BEGIN"',
        killer="../test_file_store.py: decided_on_cannot_change",
    ),
    Mutant(
        "records are not verified",
        "wrong bytes reach a model",
        "stores/record.py",
        "sealed = _digest(header[: _FIELDS.size], body) == header[_DIGEST]",
        "sealed = True",
        killer="../test_record.py: no_single_bit",
    ),
    Mutant(
        "a record of another key is taken",
        "wrong bytes reach a model, with a good checksum",
        "stores/record.py",
        "if claims.key != key:",
        "if False:",
        killer="../test_record.py: another_key",
    ),
    Mutant(
        "touch does nothing",
        "what is hit in memory is recycled first",
        "stores/index.py",
        "self._stamp(enumerate(keys, start=self._tick(len(keys))))",
        "self._tick(len(keys))",
        killer="../test_file_store.py: touched_records_stay",
    ),
    Mutant(
        "published before the bytes are there",
        "a reader finds a slot's old bytes under a new key",
        "stores/file.py",
        "            landed, abandoned = self._put(grant.claims, bodies)  # bytes first, then the"
        " promise\n"
        "            present = grant.present | self._publish(landed, abandoned)\n",
        "            present = grant.present | self._publish(grant.claims, [])\n"
        "            landed, abandoned = self._put(grant.claims, bodies)\n",
        killer="test_store_order.py: before_the_promise",
    ),
    Mutant(
        "a late writer publishes",
        "a slot that was claimed again holds another's bytes",
        "stores/index.py",
        '" WHERE slab = ? AND number = ? AND sequence = ? AND state = 2",\n'
        "                    (key.page, *place),\n",
        '" WHERE slab = ? AND number = ? AND state = 2",\n'
        "                    (key.page, *place[:2]),\n",
        killer="../test_file_store.py: late_writer_cannot_publish",
    ),
    Mutant(
        "a dead writer keeps its slot",
        "slots are lost with every crash",
        "stores/index.py",
        "if not alive(owner):",
        "if owner:",
        killer="../test_file_store_faults.py: dead_writer_held",
    ),
]
