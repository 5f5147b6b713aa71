"""A waiting line of pages for a lower tier."""

from __future__ import annotations

import numpy as np

from ..schema import NO_IDS, Ids
from .residency import Residency


class Line:
    """Pages that wait for one route, in order, by group. Each entry holds its page once."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.entries: list[list[Ids]] = [[] for _ in residency.schema.groups]

    def __len__(self) -> int:
        return sum(map(len, self.entries))

    def add(self, group: int, pages: Ids) -> None:
        """Hold pages and append them."""
        if len(pages):
            self._residency.table.hold(pages)
            self.entries[group].append(pages)

    def put_back(self, group: int, pages: Ids) -> None:
        """Prepend pages that :meth:`take` returned and that are still held."""
        if len(pages):
            self.entries[group].insert(0, pages)

    def take(self, group: int) -> Ids:
        """Remove and return a group's pages, each once and still held: put back or unhold them."""
        entries, self.entries[group] = self.entries[group], []
        if not entries:
            return NO_IDS
        waiting = np.concatenate(entries)
        pages, first, times = np.unique(waiting, return_index=True, return_counts=True)
        while len(again := pages[times > 1]):  # to give back a hold takes distinct ids
            self._residency.unhold(again)
            times -= 1
        return waiting[np.sort(first)]

    def is_longer(self, group: int, most: int) -> bool:
        """More than ``most`` entries of a group wait."""
        return sum(map(len, self.entries[group])) > most
