"""Which rows of a packed batch see what, as index arrays: worked out once per step.

Sequences that begin with the same slots have a *run* in common. Of what else they see, sequences of
about the same length are *stacked*: padded to one length, they are one call instead of many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .attention import Part

_SHARED = 512  # tokens that a run saves the reading of; with fewer, merging costs more
_STACKED = 2048  # tokens of a stack, padding included; about what stays in a core's cache

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Rows that follow one another in a layout's order, and what they see."""

    rows: slice
    seen: Tensor  # [sequences, length] int64 rows of a flat pool; a sequence's last may be repeated
    mask: Tensor | None = None  # [sequences, 1, rows of each, length] float32 to add; None: zeros


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the rows of a packed batch go in a flat pool, and what they see there."""

    positions: Tensor  # [rows] int64, of each row in its sequence
    index: Tensor  # [rows] int64, where it goes
    order: Tensor  # [rows] int64, packed rows in the order of the spans
    spans: tuple[Span, ...]  # each row is in one
    runs: tuple[Span, ...]  # what rows see besides, in common with other sequences


def lay_out(
    parts: Sequence[Part], page_tokens: int, window: int | None, device: torch.device
) -> Layout:
    """See :meth:`~kvkeep.models.attention.Attention.plan`."""
    first, start, rows, pages = np.array(
        [(part.first, part.start, part.rows, len(part.table)) for part in parts]
    ).T
    tables = np.concatenate([part.table for part in parts]).astype(np.int64)
    tokens = (tables[:, None] * page_tokens + np.arange(page_tokens)).ravel()
    zero = (np.cumsum(pages) - pages) * page_tokens  # where each sequence begins in ``tokens``
    positions = _ranges(start, rows)
    index = tokens[positions + np.repeat(zero, rows)]

    of_run = np.full(len(parts), -1)
    common: list[Ints] = []  # what each run is made of
    if window is None:
        for members, end in _runs(parts, page_tokens):
            one = members[0]
            of_run[members] = len(common)
            common.append(tokens[zero[one] + first[one] : zero[one] + end])
            first[members] = end
    else:
        first = np.maximum(first, start - window + 1)

    length = start + rows - first
    sequences = np.lexsort((length, rows, of_run))
    row_of_run = np.repeat(of_run[sequences], rows[sequences])
    spans, row = [], 0
    for stack in _stacks(sequences, of_run, rows, length):
        seen, mask = _see(first[stack], start[stack], int(rows[stack[0]]), length[stack], window)
        end = row + len(stack) * int(rows[stack[0]])
        where = _on(device, tokens[seen + zero[stack, None]])
        spans.append(Span(slice(row, end), where, None if mask is None else mask.to(device)))
        row = end
    runs = []
    for i, seen in enumerate(common):
        begin, end = np.searchsorted(row_of_run, (i, i + 1)).tolist()
        runs.append(Span(slice(begin, end), _on(device, seen)[None]))
    packed = (np.cumsum(rows) - rows)[sequences]
    return Layout(
        _on(device, positions),
        _on(device, index),
        _on(device, _ranges(packed, rows[sequences])),
        tuple(spans),
        tuple(runs),
    )


def _runs(parts: Sequence[Part], page_tokens: int) -> Iterator[tuple[list[int], int]]:
    """Sequences that begin with the same slots, and the position where the last common page ends.

    Only pages before all their rows count.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for i, part in enumerate(parts):
        alike.setdefault((part.first, int(part.table[part.first // page_tokens])), []).append(i)
    for (first, _), members in alike.items():
        if len(members) < 2:
            continue
        skip = first // page_tokens
        stop = min(parts[i].start for i in members) // page_tokens
        tables = np.stack([parts[i].table[skip:stop] for i in members])
        differ = (tables != tables[0]).any(0)
        end = (skip + int(differ.argmax() if differ.any() else differ.size)) * page_tokens
        if (len(members) - 1) * (end - first) >= _SHARED:
            yield members, end


def _stacks(sequences: Ints, of_run: Ints, rows: Ints, length: Ints) -> Iterator[Ints]:
    """``sequences`` in pieces: equally many rows, of about one length, together not too much."""
    begin = 0
    kind = list(zip(of_run[sequences].tolist(), rows[sequences].tolist(), strict=True))
    sizes = length[sequences].tolist()
    for i in range(1, len(sequences)):
        much = (i + 1 - begin) * sizes[i] > _STACKED or 4 * sizes[i] > 5 * sizes[begin]
        if much or kind[i] != kind[begin]:
            yield sequences[begin:i]
            begin = i
    yield sequences[begin:]


def _see(
    first: Ints, start: Ints, rows: int, length: Ints, window: int | None
) -> tuple[Ints, Tensor | None]:
    """Of a stack of sequences with equally many rows: the positions that they see, and the mask."""
    column = np.arange(length.max())
    seen = first[:, None] + np.minimum(column, length[:, None] - 1)
    if rows == 1 and length.min() == length.max():
        return seen, None
    own = (start - first)[:, None, None] + np.arange(rows)[:, None]  # each row's own column
    hidden = column > own
    if window is not None:
        hidden |= column <= own - window
    mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), -torch.inf)
    return seen, mask[:, None]


def _ranges(first: Ints, count: Ints) -> Ints:
    """``[first, first + count)`` of each, one after another."""
    end = np.cumsum(count)
    return np.arange(end[-1]) + np.repeat(first - end + count, count)


def _on(device: torch.device, array: Ints) -> Tensor:
    return torch.from_numpy(array).to(device)
