"""The waiting line: which request is admitted next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .request import RequestState

Rank = Callable[[RequestState], float]
"""Requests with the lowest rank go first, earlier arrivals first among equals."""


def _longest_prefix(seq: RequestState) -> float:
    """Longest prefix match in any tier, as known when storage answered (SGLang's ``lpm``)."""
    return -seq.prefetch.reach if seq.prefetch else 0


POLICIES: dict[str, Rank] = {
    "fcfs": lambda seq: 0,
    "lpm": _longest_prefix,
    "priority": lambda seq: -seq.request.priority,
}


class WaitingLine:
    """Requests without a lease. Engine's thread only.

    A request that was preempted goes first. Then come requests that have waited longer than
    ``patience`` seconds, so that no policy starves them, then all others by the policy.

    Args:
        policy: one of :data:`POLICIES`.
    """

    def __init__(self, policy: str, patience: float) -> None:
        self._rank, self._patience = POLICIES[policy], patience
        self._preempted: list[RequestState] = []  # the last one first
        self._arrived: dict[RequestState, None] = {}  # an ordered set

    def __len__(self) -> int:
        return len(self._preempted) + len(self._arrived)

    def __iter__(self) -> Iterator[RequestState]:
        """All requests, the next one first."""
        late = time.monotonic() - self._patience
        patient = [seq for seq in self._arrived if seq.times.arrived > late]
        yield from list(self._preempted)
        yield from [seq for seq in self._arrived if seq.times.arrived <= late]
        yield from sorted(patient, key=self._rank)

    def add(self, seq: RequestState) -> None:
        """A request has arrived."""
        self._arrived[seq] = None

    def put_back(self, seq: RequestState) -> None:
        """A running request was preempted."""
        self._preempted.insert(0, seq)

    def remove(self, seq: RequestState) -> None:
        """It was admitted, or has ended."""
        if seq in self._arrived:
            del self._arrived[seq]
        else:
            self._preempted.remove(seq)
