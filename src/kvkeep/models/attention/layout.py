"""Index arrays that say what each row of a packed batch sees, made once per step.

Sequences that begin with the same slots share a *run*, which is read once for all of them. For the
rest, sequences of similar length are *stacked*: padded to one length, they need one call, not many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .interface import Part

_SHARED = 512  # tokens not read twice; a run that saves fewer costs more to merge than it saves
_STACKED = 1024  # most tokens in a stack, padding included; longer sequences gain nothing

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Rows that are consecutive in a layout's order, and the tokens that they see."""

    rows: slice
    count: int  # number of sequences; each has equally many of the rows
    length: int  # tokens that each sequence sees, padding included
    unit: int  # tokens per entry of ``seen``: a page, or one token in a stack
    seen: Tensor  # [units] int64, their places in a pool; padding repeats a sequence's last
    skip: int = 0  # leading tokens of the first unit that are not seen
    mask: Tensor | None = None  # [count, 1, rows of each, length] float32 to add; None: zeros


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the rows of a packed batch go in a flat pool, and what they see there."""

    positions: Tensor  # [rows] int64, each row's position in its sequence
    index: Tensor  # [rows] int64, each row's place in the pool
    order: Tensor  # [rows] int64, packed rows in the order of the spans
    spans: tuple[Span, ...]  # every row is in exactly one
    runs: tuple[Span, ...]  # prefixes that several sequences share


def lay_out(
    parts: Sequence[Part], page_tokens: int, window: int | None, device: torch.device
) -> Layout:
    """See :meth:`~kvkeep.models.attention.interface.Attention.plan`."""
    batch = _Batch(parts, page_tokens, window, device)
    shared = _shared(parts, page_tokens) if window is None else []
    alone = set(range(len(parts))).difference(*(members for members, _ in shared))
    spans, runs, order, row = [], [], [], 0
    for members, end in [*shared, (sorted(alone), 0)]:
        if end:
            rows = slice(row, row + int(batch.rows[members].sum()))
            runs.append(batch.pages(rows, members[0], end))
            batch.first[members] = end
        for stack in batch.stacks(members):
            spans.append(batch.span(row, stack))
            row = spans[-1].rows.stop
            order += stack
    packed = np.cumsum(batch.rows) - batch.rows
    positions = _ranges(batch.start, batch.rows)
    return Layout(
        _on(device, positions),
        _on(device, batch.where(np.arange(len(parts)).repeat(batch.rows), positions)),
        _on(device, _ranges(packed[order], batch.rows[order])),
        tuple(spans),
        tuple(runs),
    )


def _shared(parts: Sequence[Part], page_tokens: int) -> list[tuple[list[int], int]]:
    """Groups of sequences that begin with the same slots, and the position where these end.

    Only whole pages count that precede all rows of the group.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for i, part in enumerate(parts):
        alike.setdefault((part.first, int(part.table[part.first // page_tokens])), []).append(i)
    found = []
    for (first, _), members in alike.items():
        if len(members) == 1:
            continue
        skip = first // page_tokens
        stop = min(parts[i].start for i in members) // page_tokens
        tables = np.stack([parts[i].table[skip:stop] for i in members])
        same = (tables == tables[0]).all(0)
        end = (skip + int(np.logical_and.accumulate(same).sum())) * page_tokens
        if (len(members) - 1) * (end - first) >= _SHARED:
            found.append((members, end))
    return found


class _Batch:
    """Parts as arrays, and spans of them. The caller moves ``first`` past what a run covers."""

    def __init__(
        self, parts: Sequence[Part], page_tokens: int, window: int | None, device: torch.device
    ) -> None:
        self.first, self.start, self.rows, pages = np.array(
            [(part.first, part.start, part.rows, len(part.table)) for part in parts]
        ).T
        if window is not None:
            self.first = np.maximum(self.first, self.start - window + 1)
        self._tables = np.concatenate([part.table for part in parts]).astype(np.int64)
        self._table = _on(device, self._tables)
        self._zero = np.cumsum(pages) - pages  # where each sequence's table begins in _tables
        self._page, self._window, self._device = page_tokens, window, device

    def where(self, sequence: Ints, position: Ints) -> Ints:
        """The place of each position in a flat pool."""
        slots: Ints = self._tables[self._zero[sequence] + position // self._page]
        return slots * self._page + position % self._page

    def stacks(self, members: Sequence[int]) -> Iterator[list[int]]:
        """Split ``members`` into stacks: equally many rows, similar lengths, limited size."""
        rows, length = self.rows.tolist(), (self.start + self.rows - self.first).tolist()
        stack: list[int] = []
        for i in sorted(members, key=lambda i: (rows[i], length[i])):
            full = (len(stack) + 1) * length[i] > _STACKED
            if stack and (full or rows[i] > rows[stack[0]] or 4 * length[i] > 5 * length[stack[0]]):
                yield stack
                stack = []
            stack.append(i)
        if stack:
            yield stack

    def span(self, row: int, stack: list[int]) -> Span:
        """The span of a stack whose first row is ``row``."""
        each = int(self.rows[stack[0]])
        rows = slice(row, row + len(stack) * each)
        length = self.start[stack] + each - self.first[stack]
        longest = int(length[-1])
        mask = self._mask(stack, longest) if each > 1 or length[0] < longest else None
        if len(stack) == 1:
            return self.pages(rows, stack[0], int(self.start[stack[0]]) + each, mask)
        columns = np.minimum(np.arange(longest), length[:, None] - 1)
        seen = self.where(np.array(stack)[:, None], self.first[stack, None] + columns)
        return Span(rows, len(stack), longest, 1, _on(self._device, seen.ravel()), mask=mask)

    def pages(self, rows: slice, sequence: int, end: int, mask: Tensor | None = None) -> Span:
        """The span of ``rows`` over one sequence's pages up to position ``end``."""
        first, zero, page = int(self.first[sequence]), int(self._zero[sequence]), self._page
        seen = self._table[zero + first // page : zero - (-end // page)]
        return Span(rows, 1, end - first, page, seen, first % page, mask)

    def _mask(self, stack: list[int], length: int) -> Tensor:
        """``-inf`` for each of ``length`` tokens that a row of the stack must not see, else 0."""
        own = torch.from_numpy(self.start[stack] - self.first[stack])[:, None, None, None]
        row = own + torch.arange(int(self.rows[stack[0]]))[:, None]
        column = torch.arange(length)
        hidden = column > row
        if self._window is not None:
            hidden |= column <= row - self._window
        return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf).to(self._device)


def _ranges(first: Ints, count: Ints) -> Ints:
    """The ranges ``[first, first + count)``, concatenated."""
    end = np.cumsum(count)
    return np.arange(end[-1]) + np.repeat(first - end + count, count)


def _on(device: torch.device, array: Ints) -> Tensor:
    return torch.from_numpy(array).to(device)
