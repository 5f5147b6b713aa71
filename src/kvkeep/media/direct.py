"""The I/O backend ``direct``: plain copies, by the copy engine where there is one.

Slots that are consecutive on both sides move in one copy. Where none are, a save makes one copy per
page, and a load one per page and layer. On a CPU that is about as fast as one copy of the same
bytes if a page has 64 KiB or more in a layer, and half as fast with 16 KiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..schema import Slots
from .base import Copy
from .pieces import LoadStep, Piece

Runs = dict[int, list[tuple[slice, slice]]]
"""Per group, its runs of consecutive slots: (source, target)."""


class Direct:
    """Copies between pools and arenas.

    Args:
        pieces: all pieces.
        steps: all pieces in the order of a load.
    """

    def __init__(self, pieces: Sequence[Piece], steps: Sequence[LoadStep]) -> None:
        on_cpu = all(piece.pool.device.type == "cpu" for piece in pieces)
        view: Callable[[Tensor], Any] = Tensor.numpy if on_cpu else Tensor.detach
        self._copy: Callable[[Any, Any], None] = _copy_memory if on_cpu else _copy_device

        def views(pieces: Sequence[Piece]) -> list[tuple[int, Any, Any]]:
            return [(piece.group, view(piece.pool), view(piece.arena)) for piece in pieces]

        self._pieces = views(pieces)
        self._steps = [(step.layer, views(step.pieces)) for step in steps]

    def save(self, copies: Sequence[Copy]) -> None:
        """Copy from device to host."""
        runs = _runs(copies)
        for group, pool, arena in self._pieces:
            for source, target in runs.get(group, ()):
                self._copy(arena[:, target], pool[:, source])

    def load(self, copies: Sequence[Copy]) -> Iterator[int | None]:
        """Copy from host to device; yield :attr:`LoadStep.layer` after queuing each step."""
        runs = _runs(copies)
        for layer, pieces in self._steps:
            for group, pool, arena in pieces:
                for source, target in runs.get(group, ()):
                    self._copy(pool[:, target], arena[:, source])
            yield layer


def _runs(copies: Sequence[Copy]) -> Runs:
    runs: Runs = {}
    for group, source, target in copies:
        breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
        for a, b in zip(np.split(source, breaks), np.split(target, breaks), strict=True):
            if len(a):
                runs.setdefault(group, []).append((_slice(a), _slice(b)))
    return runs


def _slice(slots: Slots) -> slice:
    return slice(int(slots[0]), int(slots[-1]) + 1)


def _copy_memory(into: NDArray[np.uint8], out_of: NDArray[np.uint8]) -> None:
    into[...] = out_of


def _copy_device(into: Tensor, out_of: Tensor) -> None:
    """Copy the largest parts that are contiguous on both sides. PyTorch would gather others in
    memory that is not pinned first."""
    for a, b in zip(into, out_of, strict=True):
        whole = a.is_contiguous() and b.is_contiguous()
        for x, y in [(a, b)] if whole else zip(a, b, strict=True):
            x.copy_(y, non_blocking=True)
