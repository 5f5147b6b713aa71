"""Clocks, samples and rows: what every part of the bench room measures with.

Two sides are compared in one process, a round of the one beside a round of the other, and a row
holds the medians over all rounds: what disturbs a machine disturbs both.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NotRequired, TypedDict

import numpy as np

Tell = Callable[[str], None]
"""Called with what is measured now, for people who wait."""
Step = Callable[[], object]
"""What is timed. All it needs was prepared before, off the clock."""
Note = Callable[[str, Step], None]
"""Times a step of this name."""


class Row(TypedDict):
    """One measurement, of ours alone or beside a peer's. Ratios are ours / peer."""

    name: str
    ours: float  # median
    unit: str  # "us", "ms", "MB/s", "bytes"
    peer: str | None  # who; None: nobody
    peer_value: float | None
    ratio: float | None
    ours_p99: NotRequired[float]  # the same in one of a hundred
    peer_p99: NotRequired[float]
    tokens: NotRequired[int]  # of a prompt


def row(name: str, ours: float, unit: str, peer: str | None = None, value: float = 0.0) -> Row:
    """A row of two figures, or of one where there is no peer."""
    if peer is None:
        return Row(name=name, ours=ours, unit=unit, peer=None, peer_value=None, ratio=None)
    return Row(name=name, ours=ours, unit=unit, peer=peer, peer_value=value, ratio=ours / value)


class Samples:
    """Seconds by operation and side."""

    def __init__(self) -> None:
        self._taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def time(self, side: str, operation: str, step: Step) -> None:
        """Run ``step`` once, on the clock."""
        start = time.perf_counter()
        step()
        self._taken[operation][side].append(time.perf_counter() - start)

    def taken(self, side: str, operation: str) -> list[float]:
        """Seconds of every run."""
        return self._taken[operation][side]

    def rows(self, label: str, ours: str, peers: Sequence[str]) -> list[Row]:
        """Microseconds of ``ours`` beside each of ``peers``; alone where there is none.

        Args:
            label: put before each operation's name.
        """
        found: list[Row] = []
        for operation, sides in self._taken.items():
            name, mine = f"{label} {operation}", sides[ours]
            found += [_beside(name, mine, who, sides[who]) for who in peers]
            if not peers:
                found.append(_alone(name, mine))
        return found


def _alone(name: str, mine: list[float]) -> Row:
    median, p99 = _figures(mine)
    alone = row(name, median, "us")
    alone["ours_p99"] = p99
    return alone


def _beside(name: str, mine: list[float], peer: str, theirs: list[float]) -> Row:
    (median, p99), (peer_median, peer_p99) = _figures(mine), _figures(theirs)
    both = row(name, median, "us", peer, peer_median)
    both["ours_p99"], both["peer_p99"] = p99, peer_p99
    return both


def _figures(seconds: list[float]) -> tuple[float, float]:
    """Median and 99th percentile, in microseconds."""
    median, p99 = np.percentile(seconds, (50, 99)) * 1e6
    return float(median), float(p99)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without pauses for garbage: it is collected before, on nobody's clock."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def frozen() -> Iterator[None]:
    """What is there now is never looked at for garbage, as in a server that has started."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def interleaved(sides: Sequence[Step], repeats: int, warm_up: int = 0) -> list[float]:
    """Median seconds of each side; they take turns."""
    taken = [[seconds(side) for side in sides] for _ in range(warm_up + repeats)]
    return [float(np.median(times)) for times in zip(*taken[warm_up:], strict=True)]


def seconds(step: Step) -> float:
    """How long ``step`` takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch computes and copies with one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
