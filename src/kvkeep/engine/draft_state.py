"""What a draft's pools hold besides the keys and values of its rows: carry, and zeroed rows.

The source of a stage has a value per token: the target's fused features, or the output of the
previous stage. ``carry`` in a page holds, for each stage, the source value of the row after the
page's last token; in a partial page, of the row after its last final token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.passes import Pools, Tables


@dataclass(frozen=True, slots=True)
class SourceValues:
    """The source values of a stage, for all sequences of a step."""

    values: Tensor  # [n, hidden]: of this step, then of earlier tokens, then one zero row
    count: int  # values of this step; those of one sequence are consecutive
    first: Sequence[int]  # per sequence, the token of its first value in this step
    offset: Sequence[int]  # per sequence, the index of that value
    known: Sequence[int]  # per sequence, the first token that has a value at all

    @classmethod
    def of(
        cls,
        values: Tensor,
        before: Sequence[Tensor],
        first: Sequence[int],
        offset: Sequence[int],
        known: Sequence[int],
    ) -> SourceValues:
        """``before``: values of tokens first - 1, first - 2, ..., each ``[sequences, hidden]``."""
        zero = values.new_zeros(1, values.shape[1])
        return cls(torch.cat((values, *before, zero)), len(values), first, offset, known)

    def take(self, wanted: Iterable[tuple[int, NDArray[np.int64]]]) -> Tensor:
        """Values ``[tokens, hidden]`` of (sequence, its tokens); 0 for tokens without a value."""
        index = [np.zeros(0, np.int64)]
        for i, tokens in wanted:
            ago = self.first[i] - tokens
            before = self.count + (ago - 1) * len(self.first) + i
            found = np.where(ago > 0, before, self.offset[i] - ago)
            index.append(np.where(tokens < self.known[i], len(self.values) - 1, found))
        return self.values.index_select(0, on(self.values.device, np.concatenate(index)))


class DraftState:
    """Reads and writes carry in a draft's pools, and zeroes rows there.

    Args:
        pools: by group name; one of them has ``carry``, unless the draft's source is ``NOTHING``.
    """

    def __init__(self, pools: Mapping[str, Pools], page_tokens: int, device: torch.device) -> None:
        self.pools = pools
        self._page_tokens, self._device = page_tokens, device
        self._carrier = next((name for name, one in pools.items() if "carry" in one), "")

    def carry(self, stage: int, tables: Sequence[Tables], tokens: Sequence[int]) -> Tensor:
        """``[sequences, hidden]``: the source value of the row of each sequence's token.

        It is arbitrary where the page of the previous token has no draft state.
        """
        pages = [max(0, token - 1) // self._page_tokens for token in tokens]
        slots = [t.slots(self._carrier)[page] for t, page in zip(tables, pages, strict=True)]
        pool = self.pools[self._carrier]["carry"][stage]
        return pool.index_select(0, on(self._device, np.maximum(slots, 0)))

    def keep(
        self,
        stage: int,
        lag: int,
        values: SourceValues,
        tables: Sequence[Tables],
        final: Sequence[range],
    ) -> None:
        """Store carry in every page that holds some of the tokens ``final`` of each sequence."""
        size = self._page_tokens
        slots, wanted = [], []
        for i, (table, tokens) in enumerate(zip(tables, final, strict=True)):
            pages = np.arange(tokens.start // size, -(-tokens.stop // size))
            slots.append(table.slots(self._carrier)[pages])
            wanted.append((i, np.minimum((pages + 1) * size, tokens.stop) - lag))
        pool = self.pools[self._carrier]["carry"][stage]
        pool.index_copy_(0, on(self._device, np.concatenate(slots)), values.take(wanted))

    def clear(self, tables: Sequence[Tables], holes: Sequence[range]) -> None:
        """Zero keys and values of the rows ``holes`` of each sequence, in all layers."""
        if not any(holes):
            return
        size = self._page_tokens
        for name, pools in self.pools.items():
            index = [
                table.slots(name)[np.array(rows) // size].astype(np.int64) * size
                + np.array(rows) % size
                for table, rows in zip(tables, holes, strict=True)
                if rows
            ]
            rows = on(self._device, np.concatenate(index))
            for pool in (pool for c, layers in pools.items() if c != "carry" for pool in layers):
                pool.flatten(0, 1).index_fill_(0, rows, 0)


def on(device: torch.device, ids: NDArray[Any]) -> Tensor:
    """``ids`` as an int64 tensor on ``device``."""
    return torch.from_numpy(ids.astype(np.int64)).to(device)
