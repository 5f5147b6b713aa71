"""Which requests run in the next step, and how much of each.

Requests wait for their prefetch, then for room on the device; what runs is grown before every
step, and when the device is full the youngest gives its slots back and waits again at the front.
Its whole pages stay in the cache, so little is computed twice.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator

from ..core.cache import Cache
from .request import RequestState
from .runner import Work

_RATIO_AT_REST, _RATIO_DECAY = 0.1, 0.98


class Scheduler:
    """Continuous batching with chunked prefill over a fixed budget of pages.

    How many requests fit is a guess about tokens that do not exist yet. The guess is a share of
    what each may still generate; it shrinks while all goes well and doubles when a request had to
    be preempted (the idea is SGLang's ``new_token_ratio``).

    Args:
        cache: where slots come from.
        chunk: tokens of prefill in one step, over all requests.
        max_running: requests that hold slots at once.
        lookahead: tokens past the known ones that a decoding step may write.
    """

    def __init__(self, cache: Cache, chunk: int, max_running: int, lookahead: int) -> None:
        self._cache = cache
        self._chunk, self._max_running, self._lookahead = chunk, max_running, lookahead
        self._page = cache.schema.page_tokens
        self._ratio = 0.5
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []  # hold a lease, oldest first
        self.counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[RequestState]:
        """Every sequence that is not finished."""
        yield from self.running
        yield from self.waiting

    def add(self, seq: RequestState) -> None:
        """A request has arrived: its prefetch starts now."""
        seq.prefetch = self._cache.prefetch(seq.tokens, seq.request.namespace)
        self.waiting.append(seq)

    def remove(self, seq: RequestState) -> None:
        """A request is finished, or nobody wants it any more."""
        (self.running if seq.lease else self.waiting).remove(seq)
        self._give_back(seq)

    def schedule(self) -> list[Work]:
        """The next step. Empty if nothing can run now: bytes are on their way, or nothing waits."""
        self._admit()
        work, budget = [], self._chunk
        for seq in list(self.running):
            if seq not in self.running:  # preempted just now
                continue
            if not seq.started:
                self._take_over(seq)
            known = seq.length - seq.computed
            chunk = known if seq.decoding else min(known, budget, self._to_cut(seq))
            if chunk and self._grow(seq, chunk):
                budget -= 0 if seq.decoding else chunk
                work.append(Work(seq, chunk, seq.to_generate))
        self._ratio = max(_RATIO_AT_REST, self._ratio * _RATIO_DECAY)
        if work:
            self.counts["steps_total"] += 1
            self.counts["step_sequences_total"] += len(work)
        return work

    def computed(self, seq: RequestState, before: int) -> None:
        """A step took ``seq`` from ``before`` tokens to where it is now."""
        seq.started = True
        self.counts["computed_tokens_total"] += seq.computed - before
        self.counts["recomputed_tokens_total"] += max(0, min(seq.reached, seq.computed) - before)
        seq.reached = max(seq.reached, seq.computed)

    def _admit(self) -> None:
        """Grant leases in order of arrival, past those whose prefetch is under way."""
        for seq in list(self.waiting):
            if len(self.running) >= self._max_running:
                return
            if seq.prefetch is not None and not self._cache.ready(seq.prefetch):
                continue
            if self.running and not self._has_room(seq):
                return
            request = seq.request
            lease = self._cache.admit(
                seq.tokens, request.namespace, self._chunk, seq.prefetch, request.priority
            )
            if lease is None:
                return
            seq.lease, seq.prefetch = lease, None
            self.waiting.remove(seq)
            self.running.append(seq)

    def _has_room(self, seq: RequestState) -> bool:
        """Whether ``seq`` likely fits beside what runs, until all are done."""
        total = sum(self._expected(one) for one in [seq, *self.running])
        return self._cache.fits(seq.tokens, seq.request.namespace, total, self._chunk)

    def _expected(self, seq: RequestState) -> int:
        """Tokens of slots that a sequence will ask for beyond what it has."""
        new = int(self._ratio * seq.to_generate) + self._lookahead + self._page
        held = len(seq.lease.slots(self._cache.schema.groups[0].name)) if seq.lease else 0
        return max(0, seq.length + new - held * self._page)

    def _take_over(self, seq: RequestState) -> None:
        """Begin after the hit. It may be on its way still, and shorter than it was at the last
        look, where a step was to be taken again."""
        lease = seq.lease
        assert lease is not None
        seq.computed = lease.pages * self._page
        seq.draft_from = 1
        for group in self._cache.schema.groups:  # the first row after a gap has no source
            if first := lease.valid_from(group.name):
                seq.draft_from = max(seq.draft_from, first * self._page + 1)
        if seq.explanation is None:
            seq.explanation = lease.explanation
            seq.times.scheduled = time.monotonic()

    def _to_cut(self, seq: RequestState) -> int:
        """Tokens until a snapshot of running state is due."""
        cut = seq.lease.next_cut(seq.computed) if seq.lease else None
        return seq.length if cut is None else cut - seq.computed

    def _grow(self, seq: RequestState, chunk: int) -> bool:
        """Slots for the next step of ``seq``, at the cost of the youngest if need be."""
        assert seq.lease is not None
        end = seq.computed + chunk
        ahead = self._lookahead if end == seq.length else 1
        while not self._cache.grow(seq.lease, end + ahead):
            if seq.lease.released:  # the cache lost its pages
                self._preempt(seq)
                return False
            youngest = self.running[-1]
            if self._cache.making_room or (youngest is seq and len(self.running) == 1):
                return False  # slots come free when transfers under way have landed
            self._preempt(youngest)
            if youngest is seq:
                return False
        return True

    def _preempt(self, seq: RequestState) -> None:
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self._give_back(seq)
        seq.prefetch = self._cache.prefetch(seq.tokens, seq.request.namespace)
        seq.preemptions += 1
        seq.computed, seq.hidden, seq.started = 0, None, False
        seq.warm, seq.snapshots = False, []
        self._ratio = min(1.0, 2 * self._ratio)
        self.counts["preemptions_total"] += 1

    def _give_back(self, seq: RequestState) -> None:
        if seq.prefetch is not None:
            self._cache.cancel(seq.prefetch)
            seq.prefetch = None
        if seq.lease is not None:
            self._cache.release(seq.lease)
            seq.lease = None
