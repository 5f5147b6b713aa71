"""Requests that wait while another computes the prefix that they share.

Without it, choices of one prompt and requests that arrive together compute the same pages side by
side. SGLang calls this in-batch prefix caching.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..core.lease import Lease
from ..schema import Schema
from .request import RequestState

MOST_LEADERS = 4
"""So many requests may compute for one in turn, each once; then it computes by itself."""
PATIENCE_SECONDS = 1.0
"""Without progress of the request that computes."""


@dataclass(slots=True)
class Following:
    """Who computes for a waiting request."""

    leader: RequestState
    pages: int  # first pages of the prompt that the leader computes for it
    seen: int  # pages that the leader had committed at the last look
    since: float = field(default_factory=time.monotonic)  # monotonic seconds; of that many


class Sharing:
    """Decides who waits for whom. Nobody waits for a request that itself waits. Engine's thread
    only."""

    def __init__(self, schema: Schema) -> None:
        self._page = schema.page_tokens
        self._snapshots = any(group.working for group in schema.groups)
        self._following: dict[RequestState, Following] = {}
        self._leaders: dict[RequestState, list[RequestState]] = {}  # that it has waited for so far

    def waits(self, seq: RequestState, running: Iterable[RequestState]) -> bool:
        """Whether one of ``running`` computes pages now that ``seq`` would compute, too."""
        if (one := self._following.get(seq)) and self._goes_on(one):
            return True
        self._following.pop(seq, None)
        before = self._leaders.get(seq, [])
        if seq.request.prompt_logprobs or len(before) >= MOST_LEADERS:
            return False
        for leader in running:
            lease = leader.lease
            if leader in before or lease is None or not self._leads(leader, lease):
                continue
            if self._alike(seq, leader):
                pages = self._shared(seq, leader, lease)
                if pages > lease.pages:
                    self._following[seq] = Following(leader, pages, lease.pages)
                    self._leaders[seq] = [*before, leader]
                    return True
        return False

    def forget(self, seq: RequestState) -> None:
        """A request was admitted, or is gone."""
        self._following.pop(seq, None)
        self._leaders.pop(seq, None)

    def _goes_on(self, one: Following) -> bool:
        lease, now = one.leader.lease, time.monotonic()
        if lease is None or not self._leads(one.leader, lease) or lease.pages >= one.pages:
            return False
        if lease.pages > one.seen:
            one.seen, one.since = lease.pages, now
        return now - one.since < PATIENCE_SECONDS

    @staticmethod
    def _leads(leader: RequestState, lease: Lease) -> bool:
        """It computes known tokens that are not in the cache, and others will find them."""
        anew = leader.request.prompt_logprobs  # whatever the cache has
        return not (leader.decoding or anew or lease.detached or lease.released)

    def _alike(self, seq: RequestState, leader: RequestState) -> bool:
        """They share a page, at least."""
        size, same = self._page, seq.request.namespace == leader.request.namespace
        return same and np.array_equal(seq.tokens[:size], leader.tokens[:size])

    def _shared(self, seq: RequestState, leader: RequestState, lease: Lease) -> int:
        """Pages that both begin with and that a hit of ``seq`` may use."""
        size = min(seq.length - 1, leader.length)
        differ = seq.tokens[:size] != leader.tokens[:size]
        pages = (int(differ.argmax()) if differ.any() else size) // self._page
        if self._snapshots:  # hits end only where a snapshot is expected
            ends = (cut // self._page for cut in lease.lasting)
            pages = max((end for end in ends if end <= pages), default=0)
        return pages
