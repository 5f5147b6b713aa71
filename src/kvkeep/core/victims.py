"""Who is evicted first: the evictable pages of one group in one tier, in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, Ids
from .pages import PageTable, count

Key = Callable[[Ids | slice], NDArray[np.int64]]
Evictable = Callable[[Ids | slice], NDArray[np.bool_]]

_SELECT, _LEAST = 0.02, 256  # share of a tier that one look for victims puts in order, and pages
_MOST_OFFERED = 1 << 12
_BLOCK, _SAMPLE = 1 << 15, 1 << 12  # pages looked at at a time; to guess where the share ends
_NO_KEYS = np.empty(0, dtype=np.int64)


class Queue:
    """Evictable pages of one group, in order, found a batch at a time.

    One look at all pages puts the first 2% in order; they are taken from the front, each checked
    again. Pages that become evictable later with a key inside the batch are merged in, so the
    order is exact at every moment.

    Args:
        capacity: slots of the group in the tier.
        key: int64 keys of pages; the lowest goes first.
        evictable: whether each of these pages may lose its slot.
    """

    def __init__(self, table: PageTable, capacity: int, key: Key, evictable: Evictable) -> None:
        self._table, self._capacity = table, capacity
        self._key, self._evictable = key, evictable
        self._pages, self._keys = NO_IDS, _NO_KEYS
        self._offered: list[Ids] = []  # since pages were taken last
        self._horizon = 0  # all evictable pages up to this key are in the batch, unless it is empty

    def offer(self, pages: Ids) -> None:
        """These may have become evictable."""
        if len(self._pages) and len(pages):
            self._offered.append(pages)
            if len(self._offered) > _MOST_OFFERED:  # nobody has taken any for long: begin anew
                self._pages, self._keys, self._offered = NO_IDS, _NO_KEYS, []

    def take(self, most: int) -> Ids:
        """At most ``most`` pages that go first, in order, out of the batch."""
        if self._offered:
            self._merge(np.concatenate(self._offered))
            self._offered = []
        while len(self._pages):
            pages, keys = self._first(most)
            fit = self._evictable(pages)
            good = fit & (self._key(pages) == keys)
            if count(good) < count(fit):  # some go later now, perhaps before others of the batch
                self._merge(pages[fit])
            elif count(good):
                victims: Ids = pages[good]
                return victims
        return self._first(most)[0] if self._refill(most) else NO_IDS

    def _first(self, most: int) -> tuple[Ids, NDArray[np.int64]]:
        """Take them out of the batch, with their keys."""
        pages, keys = self._pages[:most], self._keys[:most]
        self._pages, self._keys = self._pages[most:], self._keys[most:]
        return pages, keys

    def _refill(self, least: int) -> bool:
        """Look at all pages, a block that stays in a core's cache at a time."""
        rows, wanted = self._table.rows, int(_SELECT * self._capacity)
        limit = self._limit(rows, max(least, wanted, _LEAST))
        found = [(NO_IDS, _NO_KEYS)]
        for start in range(0, rows, _BLOCK):
            block = slice(start, min(start + _BLOCK, rows))
            keys = self._key(block)
            at = np.flatnonzero(self._evictable(block) & (keys <= limit))
            found.append((start + at, keys[at]))
        pages, keys = np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])
        order = np.argsort(keys, kind="stable")  # they come in runs, as pages do
        self._pages, self._keys = pages[order], keys[order]
        self._horizon = int(self._keys[-1]) if len(pages) else 0
        return len(pages) > 0

    def _limit(self, rows: int, wanted: int) -> int:
        """A key that about ``wanted`` evictable pages have, or a lower one; from a sample."""
        every = -(-rows // _SAMPLE) or 1
        pages = np.arange(0, rows, every)
        keys = np.sort(self._key(pages[self._evictable(pages)]))
        index = wanted // every
        return int(keys[index]) if index < len(keys) else np.iinfo(np.int64).max

    def _merge(self, pages: Ids) -> None:
        """Put those that go before the horizon in their places, each once."""
        keys = self._key(pages)
        late = keys <= self._horizon
        if count(late):
            pages = np.concatenate((self._pages, pages[late]))
            keys = np.concatenate((self._keys, keys[late]))
            order = np.lexsort((pages, keys))
            pages, keys = pages[order], keys[order]
            fresh = np.ones(len(pages), dtype=bool)
            fresh[1:] = (pages[1:] != pages[:-1]) | (keys[1:] != keys[:-1])
            self._pages, self._keys = pages[fresh], keys[fresh]
