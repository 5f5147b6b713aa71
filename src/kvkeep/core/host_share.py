"""A limit on the host memory that prefetches may hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..schema import Ids
from .residency import Residency


class HostShare:
    """Counts the host slots that prefetches pin or read into, each once however many prefetches
    keep it. Scheduler's thread only."""

    def __init__(self, residency: Residency, share: float) -> None:
        self._table = residency.table
        self._most = [int(share * slots) for slots in residency.host.capacity]
        self.reset([])

    def reset(self, kept: Iterable[tuple[int, Ids]]) -> None:
        """Recount from ``kept``: (group, pages) pairs, one per prefetch that keeps them."""
        self._table.kept[:] = 0
        self._used = [0] * len(self._most)
        for group, pages in kept:
            self.keep(group, pages)

    def keep(self, group: int, pages: Ids) -> None:
        """Count one more prefetch that keeps these."""
        users = self._table.kept[group]
        before = users[pages]
        self._used[group] += len(pages) - int(np.count_nonzero(before))
        users[pages] = before + 1

    def give_back(self, group: int, pages: Ids) -> None:
        """Count one prefetch less that keeps these."""
        users = self._table.kept[group]
        after = users[pages] - 1
        self._used[group] -= len(pages) - int(np.count_nonzero(after))
        users[pages] = after

    def loose(self, group: int, pages: Ids) -> int:
        """How many of these pages no prefetch keeps."""
        return len(pages) - int(np.count_nonzero(self._table.kept[group][pages]))

    @property
    def left(self) -> list[int]:
        """By group, host slots that prefetches may still take."""
        return [max(0, most - used) for most, used in zip(self._most, self._used, strict=True)]

    @property
    def empty(self) -> bool:
        """No prefetch keeps anything."""
        return not any(self._used)
