"""Tree, table and tiers moved together: which pages exist, where they are, and when they end.

Every change that concerns more than one of the three goes through here. A page ends when a group
that every hit needs is in neither memory tier: nothing below it can be used, so its whole subtree
leaves the tree. What somebody still holds is *dying*: out of the tree now, its id and slots
recycled with the last hold, so ids never alias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .pages import DEVICE, HOST, NO_SLOT, PageTable
from .policy import Order
from .schema import ConfigError, InvariantError, Residence, Schema
from .tier import Tier
from .tree import Tree

Ids = NDArray[np.int32]


class Residency:
    """Owns the tree, the table and both memory tiers. The scheduler's thread only."""

    def __init__(
        self, schema: Schema, device_slots: Sequence[int], host_slots: Sequence[int], order: Order
    ) -> None:
        for slots in (device_slots, host_slots):
            if len(slots) != len(schema.groups) or min(slots) < 0:
                raise ConfigError(f"{slots} slots for {len(schema.groups)} groups")
        self.schema = schema
        most = max(device_slots) + max(host_slots) + 1  # pages, unless many have no slots
        self.table = PageTable(len(schema.groups), min(1024, most))
        self.tree = Tree(schema.page_tokens)
        self.device = Tier(self.table, DEVICE, device_slots, order)
        self.host = Tier(self.table, HOST, host_slots, order)
        self.demote: Callable[[int, int], None] | None = None  # makes room on the device instead
        self._vital = [g.required and g.tail is None for g in schema.groups]

    def add(self, namespace: str, path: Ids, raw: bytes, keys: list[bytes]) -> Ids:
        """Fresh pages that follow ``path``; in the tree, with no slots yet."""
        ids = self.table.allocate(len(path), keys)
        if len(ids):
            parent = (int(path[-1]), len(path) - 1) if len(path) else None
            self.tree.insert(namespace, parent, raw, ids)
        return ids

    def present(self, path: Ids) -> list[NDArray[np.bool_]]:
        """Per group: which pages are on the device, on their way there, or on the host."""
        state = self.table.state
        return [
            (state[DEVICE, g, path] != Residence.ABSENT) | (state[HOST, g, path] == Residence.LIVE)
            for g in range(len(self.schema.groups))
        ]

    def make_room(self, tier: Tier, group: int, count: int) -> int:
        """Evict until ``count`` slots are free, or nothing may go; the slots free now.

        Fewer are free, too, while pages are on their way down: later there will be more."""
        short = count - tier.free_slots(group)
        if short > 0 and tier is self.device and self.demote is not None:
            self.demote(group, short)
        elif short > 0:
            self.evict(tier, group, short)
        return tier.free_slots(group)

    def reserve(self, tier: Tier, group: int, count: int) -> Ids | None:
        """``count`` private slots, evicting what must go; None, and nothing taken, if too few."""
        self.make_room(tier, group, count)
        return tier.reserve(group, count)

    def evict(self, tier: Tier, group: int, count: int) -> Ids:
        """Drop up to ``count`` pages of a group from a tier, in order; returns them."""
        pages = tier.evict(group, count)
        self._end(group, pages)
        return pages

    def drop(self, tier: Tier, group: int, pages: Ids) -> None:
        """Rows lose their slots, say because the bytes did not arrive."""
        tier.drop(group, pages)
        self._end(group, pages)

    def unhold(self, ids: Ids) -> None:
        """Take back one hold of each, and recycle what was waiting for that."""
        self.table.unhold(ids)
        self._reap(ids)
        if not any(self._vital):
            self._trim(ids)

    def retire(self, pages: Ids) -> None:
        """Take these pages, and all below them, out of the tree."""
        table, cuts = self.table, []
        for page in pages[np.argsort(table.depth[pages], kind="stable")]:
            if not table.dying[page]:
                cuts.append(self.tree.cut(int(page), int(table.depth[page])))
                table.dying[cuts[-1]] = True
        for gone in cuts:  # not before: ids must not be recycled while they are still looked at
            self._reap(gone)

    def _end(self, group: int, pages: Ids) -> None:
        """These lost their slots in one tier: some may be of no use any more."""
        if self._vital[group]:
            self.retire(pages[~self.table.resident(group, pages)])
        elif not any(self._vital):
            self._trim(pages)

    def _trim(self, pages: Ids) -> None:
        """Where no group is vital, a page ends when it has no slots, no holds and nothing below."""
        table = self.table
        for page in pages[np.argsort(-table.depth[pages], kind="stable")]:
            above: int | None = int(page)
            while above is not None and self._empty(above):
                depth = int(table.depth[above])
                gone, above = above, self.tree.parent(above, depth)
                self.retire(np.array([gone], dtype=np.int32))

    def _empty(self, page: int) -> bool:
        table = self.table
        if table.holds[page] or table.dying[page] or (table.slot[:, :, page] != NO_SLOT).any():
            return False
        return self.tree.is_last(page, int(table.depth[page]))

    def _reap(self, ids: Ids) -> None:
        table = self.table
        over = ids[table.dying[ids] & (table.holds[ids] == 0)]
        if not len(over):
            return
        for tier in (self.device, self.host):
            for group in range(len(self.schema.groups)):
                tier.drop(group, over[table.slot[tier.index, group, over] != NO_SLOT])
        table.recycle(over)

    def recount(self, holds: Ids, pins: Ids) -> None:
        """Believe these counts, after bookkeeping went wrong, and recycle what nobody holds."""
        self.table.holds[:], self.table.pins[:] = holds, pins
        self._reap(np.flatnonzero(self.table.dying).astype(np.int32))

    def check(self) -> None:
        """Raise InvariantError unless every owner is sound and they agree with each other."""
        table = self.table
        for owner in (table, self.tree, self.device, self.host):
            owner.check()
        inside = [node.ids for _, node in self.tree.walk()]
        ids = np.concatenate(inside) if inside else np.empty(0, dtype=np.int32)
        if len(ids) + np.count_nonzero(table.dying) != len(table):
            raise InvariantError("a page is neither in the tree nor dying")
        if table.dying[ids].any() or (table.dying & (table.holds == 0)).any():
            raise InvariantError("a dying page is in the tree, or waits for nobody")
        for group, vital in enumerate(self._vital):
            if vital and not table.resident(group, ids).all():
                raise InvariantError("a page of the tree can serve no hit")
        if any(self._empty(int(page)) for page in ids if not any(self._vital)):
            raise InvariantError("an empty page is still in the tree")
        used = table.used[[g.tail is None for g in self.schema.groups]]
        for _, node in self.tree.walk():
            above = node.parent.ids[-1:] if node.parent else node.ids[:0]
            line = used[:, np.concatenate((above, node.ids))]
            if (line[:, 1:] > line[:, :-1]).any():
                raise InvariantError("a page is newer than its ancestor")
