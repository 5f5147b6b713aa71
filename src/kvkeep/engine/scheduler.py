"""Decides which requests run in the next step, and how many tokens of each.

A request waits for its prefetch, then for room on the device, in the order of
:mod:`~kvkeep.engine.waiting`. Before every step the scheduler grows
the leases of running requests. When the device is full, it preempts the youngest request, which
gives its slots back and waits at the front of the line. Its complete pages stay in the cache, so
little is recomputed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

from ..core.cache import Cache
from .request import RequestState
from .runner import Work
from .sharing import Sharing
from .waiting import WaitingLine

_FIRST_RATIO, _LEAST_RATIO, _RATIO_DECAY = 0.5, 0.1, 0.98


class Scheduler:
    """Continuous batching with chunked prefill over a fixed number of device pages.

    Whether another request fits depends on tokens that have not been generated yet. The scheduler
    expects each request to generate a fraction of what it may still generate. The fraction decays
    with every step and doubles at every preemption (SGLang's ``new_token_ratio``).

    Engine's thread only.

    Args:
        cache: grants leases and slots.
        chunk: prefill tokens per step, over all requests.
        max_running: requests that may hold a lease at once.
        lookahead: positions after the last known token that a decoding step may write.
        waiting: the empty line of requests without a lease.
    """

    def __init__(
        self, cache: Cache, chunk: int, max_running: int, lookahead: int, waiting: WaitingLine
    ) -> None:
        self._cache, self.waiting = cache, waiting
        self._chunk, self._max_running, self._lookahead = chunk, max_running, lookahead
        self._page = cache.schema.page_tokens
        self._sharing = Sharing(cache.schema)
        self._new_token_ratio = _FIRST_RATIO
        self.running: list[RequestState] = []  # hold a lease; oldest lease first
        self.counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[RequestState]:
        """Iterate over all unfinished sequences."""
        yield from self.running
        yield from self.waiting

    def add(self, seq: RequestState) -> None:
        """Queue a request that has arrived, and start its prefetch."""
        self._prefetch(seq)
        self.waiting.add(seq)

    def remove(self, seq: RequestState) -> None:
        """Remove a finished, failed or aborted request and release what it holds."""
        (self.running if seq.lease else self.waiting).remove(seq)
        self._sharing.forget(seq)
        self._release(seq)

    def schedule(self) -> list[Work]:
        """Plan the next step: admit, grow, preempt.

        Empty if there is no request, or if all of them wait for transfers in flight.
        """
        self._admit()
        for seq in self.running:
            if not seq.started:
                self._start_after_hit(seq)
        work = []
        able = [seq for seq in self.running if seq.lease and not seq.lease.lost]
        shares = self._shares(able)
        for seq in able:
            if seq not in self.running:  # preempted by an older one in this loop
                continue
            chunk = 1 if seq.decoding else shares.get(seq, 0)
            if chunk and self._grow(seq, chunk):
                work.append(Work(seq, chunk, seq.to_generate))
        self._new_token_ratio = max(_LEAST_RATIO, self._new_token_ratio * _RATIO_DECAY)
        if work:
            self.counts["steps_total"] += 1
            self.counts["step_sequences_total"] += len(work)
        return work

    def _shares(self, able: list[RequestState]) -> dict[RequestState, int]:
        """Prompt tokens that each of these requests computes in this step.

        Half of them belong to the oldest request, and what others leave; the rest goes to requests
        with the fewest tokens left, so that a long prompt does not hold up short ones.
        """
        left = {
            seq: min(seq.length - seq.computed, self._tokens_to_cut(seq))
            for seq in able
            if not seq.decoding
        }
        shares: dict[RequestState, int] = {}
        budget = self._chunk
        oldest = next(iter(left), None)
        if oldest is not None and len(left) > 1:
            shares[oldest] = min(left[oldest], -(-budget // 2))
            budget -= shares[oldest]
        for seq in sorted(left, key=lambda seq: (seq is oldest, left[seq])):
            more = min(left[seq] - shares.get(seq, 0), budget)
            shares[seq] = shares.get(seq, 0) + more
            budget -= more
        return shares

    def computed(self, seq: RequestState, before: int) -> None:
        """Account for a completed step that advanced ``seq`` from ``before`` computed tokens."""
        seq.started = True
        again = max(0, min(seq.most_computed, seq.computed) - before)
        self.counts["computed_tokens_total"] += seq.computed - before
        self.counts["recomputed_tokens_total"] += again
        seq.most_computed = max(seq.most_computed, seq.computed)

    def _admit(self) -> None:
        """Grant leases in the line's order; skip requests whose prefetch is in flight, and those
        whose prefix a running request computes."""
        if len(self.running) >= self._max_running:
            return
        for seq in self.waiting:
            if len(self.running) >= self._max_running:
                return
            if seq.prefetch is not None and not self._cache.ready(seq.prefetch):
                continue
            if self._sharing.waits(seq, self.running):
                continue
            request, total = seq.request, self._total(seq) if self.running else 0
            lease = self._cache.admit(
                seq.tokens,
                request.namespace,
                self._chunk,
                seq.prefetch,
                seq.retention,
                total,
                reuse=not request.prompt_logprobs,
            )
            if lease is None:
                return
            seq.lease, seq.prefetch = lease, None
            self._sharing.forget(seq)
            self.waiting.remove(seq)
            self.running.append(seq)
            self.counts["admitted_tokens_total"] += seq.length

    def _total(self, seq: RequestState) -> int:
        """Tokens for which ``seq`` and all running requests are expected to need slots."""
        return sum(self._expected(one) for one in [seq, *self.running])

    def _expected(self, seq: RequestState) -> int:
        """Tokens for which a sequence is expected to need slots that it does not hold yet."""
        new = int(self._new_token_ratio * seq.to_generate) + self._lookahead + self._page
        held = seq.lease.capacity if seq.lease else 0
        return max(0, seq.length + new - held * self._page)

    def _start_after_hit(self, seq: RequestState) -> None:
        """Set ``seq`` to compute from the end of its prefix hit on.

        Repeated until a first step succeeds: a load that fails in flight shortens the hit.
        """
        lease = seq.lease
        assert lease is not None
        seq.computed = lease.pages * self._page
        seq.draft_from = 1
        for group in self._cache.schema.groups:  # the first draft row after a gap has no feature
            if first := lease.valid_from(group.name):
                seq.draft_from = max(seq.draft_from, first * self._page + 1)
        if seq.explanation is None:
            seq.explanation = lease.explanation
            seq.times.scheduled = time.monotonic()

    def _tokens_to_cut(self, seq: RequestState) -> int:
        """Tokens until the next cut: the position where recurrent state must be snapshotted."""
        cut = seq.lease.next_cut(seq.computed) if seq.lease else None
        return seq.length if cut is None else cut - seq.computed

    def _grow(self, seq: RequestState, chunk: int) -> bool:
        """Reserve slots for the next step of ``seq``; preempt the youngest if there are none.

        False if ``seq`` cannot run in this step.
        """
        assert seq.lease is not None
        end = seq.computed + chunk
        ahead = self._lookahead if end == seq.length else 1
        while not self._cache.grow(seq.lease, end + ahead):
            if seq.lease.released:  # by the cache, which repaired its bookkeeping
                self._preempt(seq)
                return False
            youngest = self.running[-1]
            if self._cache.making_room or (youngest is seq and len(self.running) == 1):
                return False  # transfers in flight will free slots when they land
            self._preempt(youngest)
            if youngest is seq:
                return False
        return True

    def _preempt(self, seq: RequestState) -> None:
        self.running.remove(seq)
        self.waiting.put_back(seq)
        self._release(seq)
        self._prefetch(seq)
        seq.preemptions += 1
        seq.computed, seq.hidden, seq.started = 0, None, False
        seq.warm, seq.snapshots = False, []
        self._new_token_ratio = min(1.0, 2 * self._new_token_ratio)
        self.counts["preemptions_total"] += 1

    def _prefetch(self, seq: RequestState) -> None:
        if not seq.request.prompt_logprobs:
            seq.prefetch = self._cache.prefetch(seq.tokens, seq.request.namespace)

    def _release(self, seq: RequestState) -> None:
        if seq.prefetch is not None:
            self._cache.cancel(seq.prefetch)
            seq.prefetch = None
        if seq.lease is not None:
            self._cache.release(seq.lease)
            seq.lease = None
