"""What a lease does with device slots: one group's share of them, from first pin to last.

A slot of a share is either the lease's own (private) or pinned through its page's row.
"""

from __future__ import annotations

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
        """Private slots for ``count`` more pages, and for the pages at ``gaps``."""
        slots = self._residency.reserve(self._device, g, count + len(gaps))
        if slots is None:
            return False
        share.slots = np.concatenate((share.slots, slots[:count]))
        share.owned = np.concatenate((share.owned, np.ones(count, dtype=bool)))
        share.slots[gaps] = slots[count:]
        share.owned[gaps] = True
        return True

    def cut(self, g: int, share: Share, size: int) -> None:
        """Free private slots from the ``size``-th page on."""
        self._device.free(g, share.slots[size:])
        share.slots, share.owned = share.slots[:size], share.owned[:size]

    def let_go(self, g: int, share: Share, path: Ids, first: int) -> None:
        """Unpin or free everything from page ``first`` on."""
        at = first + np.flatnonzero(share.slots[first:] != NO_SLOT)
        own = share.owned[at]
        self._device.free(g, share.slots[at[own]])
        self._device.unpin(g, path[at[~own]])
        share.slots, share.owned = share.slots[:first], share.owned[:first]

    def publish(self, g: int, share: Share, path: Ids, first: int) -> Ids:
        """Rows of ``path[first:]`` without a slot adopt the lease's; where a row has one, the
        lease takes that instead of its own; where one is being filled, both are kept.
        Returns the pages whose rows adopted."""
        at = np.arange(first, len(path))
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
        """Let go of pages before ``start``: out of reach, and of use only where hits ended."""
        at = np.flatnonzero(share.slots[:start] != NO_SLOT)
        own = share.owned[at]
        self._device.free(g, share.slots[at[own]])
        out = path[at[~own]]
        alone = self._table.pins[DEVICE, g, out] == 1
        self._table.used[g, out[alone & ~self._table.ends[out]]] = 0
        self._device.unpin(g, out)
        share.slots[at] = NO_SLOT
        share.owned[at] = False
