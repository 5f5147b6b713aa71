"""Victims: the evictable pages of one group in one tier, in eviction order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..schema import NO_IDS, Ids
from .pages import PageTable, count

Key = Callable[[Ids | slice], NDArray[np.int64]]
Evictable = Callable[[Ids | slice], NDArray[np.bool_]]

_SELECT, _LEAST = 0.02, 256  # of a tier's slots, and pages: what one scan sorts
_MOST_OFFERED = 1 << 12
_BLOCK, _SAMPLE = 1 << 15, 1 << 12  # pages scanned at a time; pages sampled for the key limit
_NO_KEYS = np.empty(0, dtype=np.int64)


class Queue:
    """Evictable pages of one group in exact order, found a batch at a time.

    One scan of all pages sorts the first 2%; ``take`` checks each again. Pages that become
    evictable later with a key inside the batch are merged in.

    Args:
        capacity: slots of the group in the tier.
        key: int64 keys of pages; the lowest is evicted first.
        evictable: which pages may lose their slot.
    """

    def __init__(self, table: PageTable, capacity: int, key: Key, evictable: Evictable) -> None:
        self._table, self._capacity = table, capacity
        self._key, self._evictable = key, evictable
        self._pages, self._keys = NO_IDS, _NO_KEYS
        self._offered: list[Ids] = []  # since the last ``take``
        self._horizon = 0  # the batch, unless empty, has all evictable pages up to this key

    def offer(self, pages: Ids) -> None:
        """Note pages that may have become evictable or go earlier now."""
        if len(self._pages) and len(pages):
            self._offered.append(pages)
            if len(self._offered) > _MOST_OFFERED:  # nobody has taken any for long: begin anew
                self._pages, self._keys, self._offered = NO_IDS, _NO_KEYS, []

    def take(self, most: int) -> Ids:
        """Remove and return the first pages, up to ``most``, in order."""
        if self._offered:
            self._merge(np.concatenate(self._offered))
            self._offered = []
        while len(self._pages):
            pages, keys = self._first(most)
            fit = self._evictable(pages)
            good = fit & (self._key(pages) == keys)
            if count(good) < count(fit):  # some keys have risen: sort them in again
                self._merge(pages[fit])
            elif count(good):
                victims: Ids = pages[good]
                return victims
        return self._first(most)[0] if self._refill(most) else NO_IDS

    def _first(self, most: int) -> tuple[Ids, NDArray[np.int64]]:
        """Take pages and their keys out of the batch."""
        pages, keys = self._pages[:most], self._keys[:most]
        self._pages, self._keys = self._pages[most:], self._keys[most:]
        return pages, keys

    def _refill(self, least: int) -> bool:
        """Scan all pages, in blocks that fit a core's cache."""
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
        """A key that about ``wanted`` evictable pages do not exceed, from a sample."""
        every = -(-rows // _SAMPLE) or 1
        pages = np.arange(0, rows, every)
        keys = np.sort(self._key(pages[self._evictable(pages)]))
        index = wanted // every
        return int(keys[index]) if index < len(keys) else np.iinfo(np.int64).max

    def _merge(self, pages: Ids) -> None:
        """Sort pages up to the horizon into the batch, each once."""
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
