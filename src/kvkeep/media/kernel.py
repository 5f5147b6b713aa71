"""The I/O backend ``kernel``: one launch gathers and scatters all layers of all groups.

A copy engine needs a command for every page and layer. A kernel finds them in a table of addresses,
and reads and writes pinned host memory itself. The idea is from SGLang's ``transfer_kv`` kernels.
For tests, Triton's interpreter runs it on a CPU (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .base import Copy
from .pieces import LoadStep, Piece

_BLOCK = 1024  # words that one program copies
_BACK = [0, 3, 4, 1, 2, 5]  # columns of a table of parts in the other direction


@triton.jit  # type: ignore[untyped-decorator]
def _move(parts: tl.tensor, pages: tl.tensor, WORD: tl.constexpr, BLOCK: tl.constexpr) -> None:  # noqa: N803
    """Copy block z of page x in part y, if the page is of the part's group.

    Args:
        parts: ``[parts, 6]`` int64: group, source address and bytes per slot, target address and
            bytes per slot, words of a page.
        pages: ``[pages, 3]`` int32: group, source slot, target slot.
    """
    page = pages + 3 * tl.program_id(0)
    part = parts + 6 * tl.program_id(1)
    if tl.load(page) == tl.load(part):
        source = tl.load(part + 1) + tl.load(page + 1) * tl.load(part + 2)
        target = tl.load(part + 3) + tl.load(page + 2) * tl.load(part + 4)
        at = BLOCK * tl.program_id(2) + tl.arange(0, BLOCK)
        mine = at < tl.load(part + 5)
        words = tl.load(source.to(tl.pointer_type(WORD)) + at, mask=mine)
        tl.store(target.to(tl.pointer_type(WORD)) + at, words, mask=mine)


class Kernel:
    """Copies between pools on a device and arenas that it can access directly.

    Args:
        pieces: all pieces.
        steps: all pieces in the order of a load.
    """

    def __init__(self, pieces: Sequence[Piece], steps: Sequence[LoadStep]) -> None:
        self._device = pieces[0].pool.device
        table = _table(pieces)
        self._word = 8 if math.gcd(*table[:, 1:].flatten().tolist()) % 8 == 0 else 1  # bytes
        self._blocks = -(-int(table[:, 5].max()) // (self._word * _BLOCK))
        self._pieces = self._parts(table)
        self._steps = [(step.layer, self._parts(_table(step.pieces)[:, _BACK])) for step in steps]

    def _parts(self, table: NDArray[np.int64]) -> Tensor:
        words = table // np.array([1, 1, 1, 1, 1, self._word])
        return torch.from_numpy(np.ascontiguousarray(words)).to(self._device)

    def save(self, copies: Sequence[Copy]) -> None:
        """Copy from device to host."""
        self._launch(self._pieces, self._pages(copies))

    def load(self, copies: Sequence[Copy]) -> Iterator[int | None]:
        """Copy from host to device; yield :attr:`LoadStep.layer` after queuing each step."""
        pages = self._pages(copies)
        for layer, parts in self._steps:
            self._launch(parts, pages)
            yield layer

    def _pages(self, copies: Sequence[Copy]) -> Tensor:
        rows = [np.stack((np.full_like(s, g), s, t), 1) for g, s, t in copies]
        pages = np.concatenate(rows) if rows else np.empty((0, 3), np.int32)
        return torch.from_numpy(pages).to(self._device)

    def _launch(self, parts: Tensor, pages: Tensor) -> None:
        if len(parts) and len(pages):
            word = tl.int64 if self._word == 8 else tl.uint8
            _move[len(pages), len(parts), self._blocks](parts, pages, word, _BLOCK)


def _table(pieces: Sequence[Piece]) -> NDArray[np.int64]:
    """``[parts, 6]`` as in :func:`_move`, in bytes, from device to host. A part is one layer of a
    component."""
    rows = []
    for piece in pieces:
        for p in piece.each_layer():
            sides = (side for x in (p.pool, p.arena) for side in (x.data_ptr(), x.stride(1)))
            rows.append((p.group, *sides, p.pool.shape[2]))
    return np.array(rows, dtype=np.int64).reshape(-1, 6)
