"""What a draft keeps in its page pools beside what its layers write: carry, and rows that are none.

What feeds a stage is a *stream* with a value per token: the target's fused features, or the output
of the stage before. ``carry`` in a page is, for each stage, the value that the row after the page's
last token will need; in a page that is not full, the row after its last final token.
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
    """What feeds a stage, of all sequences of a step."""

    values: Tensor  # [n, hidden]: those of the step, those before, and last a zero row
    count: int  # values of the step; each sequence's are consecutive
    first: Sequence[int]  # by sequence, the token of its first value of the step
    offset: Sequence[int]  # by sequence, where that value lies
    known: Sequence[int]  # by sequence, the first token that has a value at all

    @classmethod
    def of(
        cls,
        values: Tensor,
        before: Sequence[Tensor],
        first: Sequence[int],
        offset: Sequence[int],
        known: Sequence[int],
    ) -> SourceValues:
        """``before``: of tokens first - 1, of tokens first - 2, ..., ``[sequences, hidden]``."""
        zero = values.new_zeros(1, values.shape[1])
        return cls(torch.cat((values, *before, zero)), len(values), first, offset, known)

    def take(self, wanted: Iterable[tuple[int, NDArray[np.int64]]]) -> Tensor:
        """``[tokens, hidden]`` of (sequence, its tokens); zero of tokens that have no value."""
        index = [np.zeros(0, np.int64)]
        for i, tokens in wanted:
            ago = self.first[i] - tokens
            before = self.count + (ago - 1) * len(self.first) + i
            found = np.where(ago > 0, before, self.offset[i] - ago)
            index.append(np.where(tokens < self.known[i], len(self.values) - 1, found))
        return self.values.index_select(0, on(self.values.device, np.concatenate(index)))


class DraftState:
    """A draft's pools, by the block tables of sequences.

    Args:
        pools: by group name; one of them has ``carry``, unless nothing feeds the draft.
    """

    def __init__(self, pools: Mapping[str, Pools], page_tokens: int, device: torch.device) -> None:
        self.pools = pools
        self._page_tokens, self._device = page_tokens, device
        self._keeper = next((name for name, one in pools.items() if "carry" in one), "")

    def carry(self, stage: int, tables: Sequence[Tables], tokens: Sequence[int]) -> Tensor:
        """``[sequences, hidden]``: what the row of each sequence's token has for a source.

        Where the token before is of no page with state it is anything.
        """
        pages = [max(0, token - 1) // self._page_tokens for token in tokens]
        slots = [t.slots(self._keeper)[page] for t, page in zip(tables, pages, strict=True)]
        pool = self.pools[self._keeper]["carry"][stage]
        return pool.index_select(0, on(self._device, np.maximum(slots, 0)))

    def keep(
        self,
        stage: int,
        lag: int,
        stream: SourceValues,
        tables: Sequence[Tables],
        final: Sequence[range],
    ) -> None:
        """Store carry in every page of each sequence's tokens that have just become final."""
        size = self._page_tokens
        slots, wanted = [], []
        for i, (table, tokens) in enumerate(zip(tables, final, strict=True)):
            pages = np.arange(tokens.start // size, -(-tokens.stop // size))
            slots.append(table.slots(self._keeper)[pages])
            wanted.append((i, np.minimum((pages + 1) * size, tokens.stop) - lag))
        pool = self.pools[self._keeper]["carry"][stage]
        pool.index_copy_(0, on(self._device, np.concatenate(slots)), stream.take(wanted))

    def clear(self, tables: Sequence[Tables], holes: Sequence[range]) -> None:
        """Zero keys and values of each sequence's rows ``holes``, in all layers."""
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
    """An int64 tensor."""
    return torch.from_numpy(ids.astype(np.int64)).to(device)
