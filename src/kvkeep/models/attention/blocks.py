"""Block tables of a packed batch, for kernels that follow them.

These need few tensors and little work on the host. :mod:`~kvkeep.models.attention.layout` serves
plain PyTorch instead, which needs an index of everything it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .interface import Part

_WIDTH = 64  # pages; a table's width is this times a power of four


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Block tables of a packed batch. A sequence's rows are consecutive, in order of position."""

    positions: Tensor  # [rows] int64, each row's position in its sequence
    index: Tensor  # [rows] int64, each row's place in a flat pool
    tables: Tensor  # [sequences, pages] int32 slots; arbitrary for pages that are never read
    firsts: Tensor  # [sequences] int32, earlier positions are never read
    begins: Tensor  # [sequences + 1] int32, first row of each sequence, then the number of rows
    page_tokens: int
    window: int | None  # positions that a row sees, its own included; None: all up to its own
    longest: int  # the most rows that a sequence has
    gaps: bool  # False only if all ``firsts`` are 0
    counts: NDArray[np.int64] | None = None  # rows of each sequence; None: ``longest`` each
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def even(
        cls, positions: Tensor, index: Tensor, tables: Tensor, firsts: Tensor,
        page_tokens: int, window: int | None,
    ) -> Blocks:  # fmt: skip
        """For sequences with equally many rows; positions and index are ``[sequences, rows]``."""
        sequences, rows = positions.shape
        begins = rows * torch.arange(sequences + 1, dtype=torch.int32, device=tables.device)
        return cls(
            positions.flatten(), index.flatten(), tables, firsts, begins, page_tokens, window,
            rows, gaps=True,
        )  # fmt: skip

    @property
    def capacity(self) -> int:
        """The most positions that one row can see."""
        pages = self.tables.shape[1] * self.page_tokens
        return pages if self.window is None else min(pages, self.window)

    def tiles(self, size: int) -> Tensor:
        """``[tiles, 2]`` int32: a tile's sequence, and how many of its rows precede the tile.

        A tile has ``size`` rows of one sequence; a sequence's last tile may have fewer.
        """
        if size not in self._tiles:
            self._tiles[size] = self._cut(size)
        return self._tiles[size]

    def _cut(self, size: int) -> Tensor:
        if self.counts is None:  # on the device alone, so that a CUDA graph can record it
            sequences, skips = (
                torch.arange(0, stop, step, dtype=torch.int32, device=self.tables.device)
                for stop, step in ((len(self.tables), 1), (self.longest, size))
            )
            return torch.cartesian_prod(sequences, skips).view(-1, 2)
        each = -(-self.counts // size)
        skip = np.arange(each.sum()) - np.repeat(each.cumsum() - each, each)
        tiles = np.stack((np.repeat(np.arange(len(each)), each), size * skip), 1)
        return torch.from_numpy(tiles.astype(np.int32)).to(self.tables.device)


def block_tables(
    parts: Sequence[Part], page_tokens: int, window: int | None, device: torch.device
) -> Blocks:
    """See :meth:`~kvkeep.models.attention.interface.Attention.plan`."""
    counts = np.array([part.rows for part in parts])
    begins = np.concatenate(([0], counts.cumsum()))
    starts, firsts = np.array([(part.start, part.first) for part in parts]).T
    positions = np.arange(begins[-1]) + np.repeat(starts - begins[:-1], counts)

    used = [-(-(part.start + part.rows) // page_tokens) for part in parts]
    tables = np.zeros((len(parts), _wide(max(used))), np.int32)
    for row, part, pages in zip(tables, parts, used, strict=True):
        row[:pages] = part.table[:pages]
    slots = tables[np.repeat(np.arange(len(parts)), counts), positions // page_tokens]
    index = slots.astype(np.int64) * page_tokens + positions % page_tokens

    def on(array: NDArray[Any], dtype: type = np.int32) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device)

    longest = int(counts.max())
    even = counts.min() == longest
    return Blocks(
        on(positions, np.int64), on(index, np.int64), on(tables), on(firsts), on(begins),
        page_tokens, window, longest, bool(firsts.any()), None if even else counts,
    )  # fmt: skip


def _wide(pages: int) -> int:
    """A width of at least ``pages``; few widths exist, so few CUDA graphs are recorded."""
    width = _WIDTH
    while width < pages:
        width *= 4
    return width
