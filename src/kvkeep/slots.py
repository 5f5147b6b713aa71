"""What a lease does with device slots: one group's share of them, from first pin to last.

A slot of a share is either the lease's own (private) or pinned through its page's row.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from .lease import Share
from .pages import DEVICE, NO_SLOT
from .residency import Residency
from .schema import Residence

Ids = NDArray[np.int32]


class DeviceSlots:
    """Operations on shares; ``g`` is the group's index. The scheduler's thread only."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._table, self._device = residency.table, residency.device

    def pin(self, g: int, share: Share, ids: Ids) -> None:
        share.slots[self._table.depth[ids]] = self._device.pin(g, ids)

    def extend(self, g: int, share: Share, count: int, gaps: NDArray[np.intp]) -> bool:
        """Private slots for ``count`` more pages, and for the pages at ``gaps``.

        Snapshots are a luxury: without room for them, their pages go without."""
        more = np.arange(len(share.slots), len(share.slots) + count)
        if share.only is not None:
            more = more[np.isin(more, list(share.only))]
        at = np.concatenate((more, gaps))
        slots = self._residency.reserve(self._device, g, len(at))
        if slots is None:
            if share.only is None:
                return False
            at, slots = at[:0], share.slots[:0]
        share.slots = np.concatenate((share.slots, np.full(count, NO_SLOT, dtype=np.int32)))
        share.owned = np.concatenate((share.owned, np.zeros(count, dtype=bool)))
        share.slots[at] = slots
        share.owned[at] = True
        return True

    def let_go(self, g: int, share: Share, path: Ids, first: int) -> None:
        """Unpin or free everything from page ``first`` on."""
        at = first + np.flatnonzero(share.slots[first:] != NO_SLOT)
        own = share.owned[at]
        self._device.free(g, share.slots[at[own]])
        self._device.unpin(g, path[at[~own]])
        share.slots, share.owned = share.slots[:first], share.owned[:first]

    def publish(
        self, g: int, share: Share, path: Ids, first: int, snapshots: Collection[int]
    ) -> Ids:
        """Rows of ``path[first:]`` without a slot adopt the lease's; where a row has one, the
        lease takes that instead of its own; where one is being filled, both are kept.
        Of a group that keeps snapshots, only those that were taken. Returns the pages whose rows
        adopted."""
        at = first + np.flatnonzero(share.owned[first : len(path)])
        if share.only is not None:
            at = at[np.isin(at, list(snapshots))]
            lasting = path[at[np.isin(at, list(share.lasting))]]
            self._table.kept[g, lasting] = True
        ids, slots = path[at], share.slots[at]
        absent = self._table.where(DEVICE, g, ids, Residence.ABSENT)
        live = self._table.where(DEVICE, g, ids, Residence.LIVE)
        self._device.adopt(g, ids[absent], slots[absent], Residence.LIVE)
        share.slots[at[live]] = NO_SLOT
        share.owned[at[absent | live]] = False
        share.slots[at[absent | live]] = self._device.pin(g, ids[absent | live])
        self._device.free(g, slots[live])
        return ids[absent]

    def slide(self, g: int, share: Share, path: Ids, start: int) -> None:
        """Let go of pages before ``start``: out of reach, and of use only where hits end."""
        at = np.flatnonzero(share.slots[:start] != NO_SLOT)
        own = share.owned[at]
        self._device.free(g, share.slots[at[own]])
        out = path[at[~own]]
        alone = self._table.pins[DEVICE, g, out] == 1
        self._table.used[g, out[alone & ~self._table.kept[g, out]]] = 0
        self._device.unpin(g, out)
        share.slots[at] = NO_SLOT
        share.owned[at] = False
