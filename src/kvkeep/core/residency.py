"""Residency keeps tree, table and tiers in step: which pages exist, where, and when they end.

A page ends when a group that every hit needs is in neither memory tier: no hit can use a page below
it, so its whole subtree leaves the tree. Pages still held are *dying*: the last unhold recycles
the id, so ids never alias, and their slots are freed as soon as nobody uses or fills them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, ConfigError, Ids, InvariantError, Schema, Slots, chain_keys
from .pages import ABSENT, DEVICE, HOST, LIVE, NO_SLOT, ZERO, PageTable, States, count
from .policy import Order
from .presence import HitRule, Presence
from .tier import Tier
from .tree import Node, Raw, Tree


class Residency:
    """Owns the tree, the table and both memory tiers. Scheduler's thread only.

    Args:
        device_slots, host_slots: slots of each group.
        order: the eviction order.
        strict: see :class:`HitRule`.
        keyed: compute chained keys, which storage needs.
    """

    def __init__(
        self,
        schema: Schema,
        device_slots: Sequence[int],
        host_slots: Sequence[int],
        order: Order,
        strict: bool = True,
        keyed: bool = False,
    ) -> None:
        for slots in (device_slots, host_slots):
            if len(slots) != len(schema.groups) or min(slots) < 0:
                raise ConfigError(f"{slots} slots for {len(schema.groups)} groups")
        self.schema = schema
        most = max(device_slots) + max(host_slots) + 1  # pages, unless many have no slots
        self.table = PageTable(schema.clocks, most)
        self.tree = Tree(schema.page_tokens)
        self.device = Tier(self.table, DEVICE, device_slots, order)
        self.host = Tier(self.table, HOST, host_slots, order)
        self.tiers = self.device, self.host
        self.rule = HitRule(schema.groups, strict)
        self._trims = not self.rule.vital
        self._by_clock = dict(zip(schema.clocks, schema.groups, strict=True))
        whole = [clock for clock, group in self._by_clock.items() if group.tail is None]
        self._whole = np.array(whole, dtype=np.intp)[:, None]
        self._keyed, self._looked = keyed, 0.0

    def extend(self, root: bytes, path: Ids, raw: Raw) -> Ids:
        """``path`` and the pages ``raw`` after it: known ones, then fresh ones."""
        if len(path):
            known = self.tree.below(int(path[-1]), len(path) - 1, raw)
        else:
            known = self.tree.match(root, raw)
        path = np.concatenate((path, known)) if len(known) else path
        raw, keys = raw[len(known) * self.tree.page_bytes :], []
        if self._keyed:
            above = self.table.keys(path[-1:])[0] if len(path) else root
            keys = chain_keys(above, raw, self.schema.page_tokens)
        return np.concatenate((path, self.add(root, path, raw, keys)))

    def add(self, root: bytes, path: Ids, raw: Raw, keys: list[bytes]) -> Ids:
        """Add pages ``raw`` after ``path``, without slots; ``keys``: chained keys, or none."""
        ids = self.table.allocate(path, len(raw) // self.tree.page_bytes, keys)
        if len(ids):
            parent = (int(path[-1]), len(path) - 1) if len(path) else None
            self.tree.insert(root, parent, raw, ids)
        return ids

    def stamp(self, path: Ids) -> None:
        """Mark everything that a hit on ``path`` needs as used now, with one tick."""
        now = self.table.tick()
        for clock, group in self._by_clock.items():
            self.table.used[clock][path[group.needed(len(path)).start :]] = now

    def present(self, path: Ids, device: States) -> Presence:
        """The part of a path that is on the device, being loaded, or LIVE on the host.

        ``device``: its states on the device."""
        here = device != ABSENT
        if count(here) < here.size:
            here |= self.table.states(HOST, path) == LIVE
        return Presence(self.rule, here)

    def make_room(self, tier: Tier, group: int, count: int) -> int:
        """Evict until ``count`` slots are free or nothing is evictable; returns free slots."""
        if (short := count - tier.free_slots(group)) > 0:
            self.evict(tier, group, short)
        return tier.free_slots(group)

    def evict(self, tier: Tier, group: int, count: int) -> Ids:
        """Evict up to ``count`` pages in eviction order; returns them."""
        pages = tier.evict(group, count)
        self._end(group, pages)
        return pages

    def drop(self, tier: Tier, group: int, pages: Ids) -> None:
        """Free the slots of these pages in a tier."""
        tier.drop(group, pages)
        self._end(group, pages)

    def drop_idle(self, tier: Tier, group: int, pages: Ids) -> None:
        """Free the slots that no request or ticket uses."""
        self.drop(tier, group, pages[tier.evictable(group, pages)])

    def expire(self) -> None:
        """Reset priorities that have run out, at most once a second."""
        if (now := time.monotonic()) < self._looked + 1:
            return
        table, self._looked = self.table, now
        over = np.flatnonzero((table.priority > 0) & (table.until <= now))
        table.priority[over] = table.until[over] = 0
        for tier in self.tiers:
            for group in range(table.groups):
                tier.offer(group, over)

    def unhold(self, ids: Ids) -> None:
        """Remove one hold of each, and recycle dying pages without holds."""
        self.table.unhold(ids)
        self._reap(ids)
        if self._trims:
            self._trim(ids)

    def retire(self, pages: Ids) -> None:
        """Take these pages and their subtrees out of the tree."""
        table = self.table
        pages = pages[~table.dying[pages]]
        if not len(pages):
            return
        table.dying[pages] = True
        above = table.parent[pages].astype(np.intp)
        tops = pages[(above < 0) | ~table.dying[above]]
        gone = self.tree.cut(tops, table.depth[tops])
        table.dying[gone] = True
        self._reap(gone)

    def _end(self, group: int, pages: Ids) -> None:
        """End those of these pages that no hit can use without the slots they lost."""
        if group in self.rule.vital:
            self.retire(pages[~self.table.resident(group, pages)])
        elif self._trims:
            self._trim(pages)

    def _trim(self, pages: Ids) -> None:
        """Without a vital group, a page ends when it has no slots, holds or children."""
        table = self.table
        for page in pages[np.argsort(-table.depth[pages], kind="stable")]:
            above = int(page)
            while above >= 0 and self._empty(above):
                gone, above = above, int(table.parent[above])
                self.retire(np.array([gone]))

    def _empty(self, page: int) -> bool:
        table = self.table
        if table.holds[page] or table.dying[page] or (table.slot[:, :, page] != NO_SLOT).any():
            return False
        return self.tree.is_last(page, int(table.depth[page]))

    def _reap(self, ids: Ids) -> None:
        """Of dying pages: free slots not in use, recycle pages without holds."""
        table = self.table
        ids = ids[table.dying[ids]]
        if not len(ids):
            return
        over = table.holds[ids] == ZERO
        for tier in self.tiers:
            tier.purge(ids, over)
        table.recycle(ids[over])

    def recount(
        self,
        holds: NDArray[np.int32],
        pins: NDArray[np.int32],
        private: Sequence[Sequence[Slots]],
        broken: Ids,
    ) -> None:
        """Rebuild everything else from the tree, the rows and these counts.

        Args:
            private: by tier and group, reserved slots without a row.
            broken: pages to retire; some may have left the tree.
        """
        table, inside = self.table, self._inside()
        table.recount(holds, pins)
        for tier in self.tiers:
            tier.recount(private[tier.index])
        for node, line in self._lines():
            table.depth[node.ids] = np.arange(node.first, node.first + node.size)
            table.parent[node.ids[:1]] = -1
            table.parent[line[1:]] = line[:-1]
            used = table.used[self._whole, line]
            table.used[self._whole, line] = np.minimum.accumulate(used, axis=1)
        table.dying[:] = True
        table.dying[inside] = False
        self._reap(np.flatnonzero(table.dying))
        self.retire(np.intersect1d(broken, inside))
        for group in range(table.groups):
            self._end(group, self._inside())

    def _inside(self) -> Ids:
        return np.concatenate([NO_IDS, *(node.ids for _, node in self.tree.walk())])

    def _lines(self) -> Iterator[tuple[Node, Ids]]:
        """Every node, parents first, and its pages preceded by the page above, if any."""
        for _, node in self.tree.walk():
            above = node.parent.ids[-1:] if node.parent else NO_IDS
            yield node, np.concatenate((above, node.ids))

    def check(self) -> None:
        """Raise InvariantError unless tree, table and tiers are sound and agree."""
        table = self.table
        for owner in (table, self.tree, *self.tiers):
            owner.check()
        ids = self._inside()
        if len(ids) + np.count_nonzero(table.dying) != len(table):
            raise InvariantError("a page is neither in the tree nor dying")
        if table.dying[ids].any() or (table.dying & (table.holds == 0)).any():
            raise InvariantError("a dying page is in the tree or has no holds")
        if not all(table.resident(group, ids).all() for group in self.rule.vital):
            raise InvariantError("a page of the tree can serve no hit")
        if self._trims and any(self._empty(int(page)) for page in ids):
            raise InvariantError("an empty page is still in the tree")
        for _, line in self._lines():
            used = table.used[self._whole, line]
            if (used[:, 1:] > used[:, :-1]).any():
                raise InvariantError("a page is newer than its ancestor")
