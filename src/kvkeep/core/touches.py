"""Touches: report hits in any tier to storage, so that it recycles the hit records last.

Without touches, a prefix that memory always serves looks unused to storage, which drops it first;
after a restart no hit can use what survived. Touches may be lost, so they are bounded: waiting hits
are merged, the oldest are dropped, and at most one call is in flight, on the "ask" lane, so that
writes never wait for it.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

from ..schema import Key
from .lane_work import Inquiry
from .storage import CALL_RECORDS, Storage
from .transfer import Transfers

_MOST_PAGES = 1 << 13  # of hits that wait
_MERGED = 4 * CALL_RECORDS  # records that are enough to merge in one tick


class _Hit(NamedTuple):
    pages: list[bytes]  # chained keys of a path
    firsts: list[int]  # by group: the first page that the hit needed


class Touches:
    """Hits not yet reported to storage. Scheduler's thread only."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._hits: deque[_Hit] = deque()  # the oldest first
        self._pages = 0  # of all hits in ``_hits``
        self._merged: dict[Key, None] = {}  # an ordered set of records to touch, the oldest first
        self._asking = False  # a call is in flight

    @property
    def idle(self) -> bool:
        """No hit waits to be reported, and no call is in flight."""
        return not (self._hits or self._merged or self._asking)

    def add(self, pages: list[bytes], firsts: list[int]) -> None:
        """Note a hit. ``pages``: its path's keys; ``firsts``: by group, its first needed page."""
        self._hits.append(_Hit(pages, firsts))
        self._pages += len(pages)
        while self._pages > _MOST_PAGES and len(self._hits) > 1:
            self._pages -= len(self._hits.popleft().pages)

    def send(self) -> None:
        """Report some hits, unless a call is in flight; drop them if storage is unusable."""
        if self._asking or self.idle:
            return
        if not self._transfers.storage.usable:
            self._hits.clear()
            self._merged.clear()
            self._pages = 0
        if not self._merged:
            self._merge()
        keys = list(self._merged)[:CALL_RECORDS]
        for key in keys:
            del self._merged[key]
        if keys:
            self._transfers.ask(Inquiry(partial(Storage.touch, keys=keys), self._told))
            self._asking = True

    def _merge(self) -> None:
        """Merge some hits into records, each at its newest hit: ancestors newer than descendants, a
        page's groups side by side."""
        while self._hits and len(self._merged) < _MERGED:
            hit = self._hits.popleft()
            self._pages -= len(hit.pages)
            names = [self._transfers.storage.names(g, hit.pages) for g in range(len(hit.firsts))]
            for page in reversed(range(len(hit.pages))):
                for g, first in enumerate(hit.firsts):
                    if page >= first:
                        self._merged.pop(names[g][page], None)
                        self._merged[names[g][page]] = None

    def _told(self) -> None:
        self._asking = False
