"""Draft chains before a step's target pass, true draft rows after it.

::

    position   old                 old + chunk      new
                |  chunk (known)       | accepted    |        target rows run: [old, new)
                |                                    |
        rows  old (unless there)  ...   new - 1     new       draft rows rebuilt
     sources  carry of old - 1    ...   feature of new - 1    row ``new`` only if token ``new``
                                                              was just drawn

The source of the first row, the fused feature of token old - 1, always lies in the ``carry`` of
that token's page: each step leaves the feature of its last final token there. So a chunk that goes
on where the last one ended and a hit that goes on where another request left are the same case.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.attention import Layout, Part
from ..models.base import Draft, Pools
from .request import Sequence


@dataclass(frozen=True, slots=True)
class Chain:
    """Proposals wanted for a sequence; its ``hidden`` state predicts the next token."""

    seq: Sequence
    steps: int  # at least 1


@dataclass(frozen=True, slots=True)
class Rebuild:
    """What one sequence's step has made final. ``seq.computed`` is the new count."""

    seq: Sequence
    old: int  # ``seq.computed`` before the step
    offset: int  # of row ``old`` in the step's packed target rows
    drawn: bool  # token ``seq.computed`` was drawn in this step


class Speculator:
    """Runs the draft network over one group of pools. Engine's thread only."""

    def __init__(self, draft: Draft, pools: Pools, page_tokens: int, device: torch.device) -> None:
        self._draft = draft
        self._group = draft.group(page_tokens).name
        self._pools = pools
        self._page_tokens = page_tokens
        self._device = device

    def propose(self, chains: Seq[Chain]) -> list[list[int]]:
        """Greedy chains for all sequences at once, ``steps`` tokens each, in the given order.

        Writes speculative rows at positions ``[length, length + steps - 1)``.
        """
        order = sorted(range(len(chains)), key=lambda i: -chains[i].steps)  # the living: a prefix
        found: list[list[int]] = [[] for _ in chains]
        hidden = torch.stack([chains[i].seq.hidden for i in order])
        for step in range(chains[order[0]].steps):
            tokens = self._draft.propose(hidden)
            for i, token in zip(order, tokens.tolist(), strict=True):
                found[i].append(token)
            order = [i for i in order if chains[i].steps > step + 1]
            if not order:
                break
            parts = [self._part(s := chains[i].seq, s.length + step, 1) for i in order]
            layout = self._layout(parts)
            kept = slice(len(order))
            hidden = self._draft.forward(tokens[kept], hidden[kept], layout, self._pools)
        return found

    def rebuild(self, done: Seq[Rebuild], features: Tensor) -> None:
        """Write draft rows from true features, ``carry`` and each sequence's ``hidden``.

        Args:
            done: one per sequence of the step; tokens and ``computed`` are already updated.
            features: ``[rows, aux layers * hidden]`` of the step's packed target rows.
        """
        fused = self._draft.fuse(features)
        carry = self._pools["carry"][0]
        pages: list[int] = []  # slots whose carry is a first row's source
        holes: list[int] = []  # rows that stay out
        parts, tokens, sources, ends = [], [], [], []
        rows = 0
        for d in done:
            seq, table = d.seq, self._table(d.seq)
            first = d.old if seq.hidden is None else d.old + 1
            last = seq.computed if d.drawn else seq.computed - 1
            source = np.arange(first, last + 1) - 1 - d.old + d.offset  # row of ``fused``
            if first < seq.draft_from:  # its source is unknown: cold start, or a carry that is gone
                holes.append(self._row(table, first))
                first, source = first + 1, source[1:]
            elif first == d.old:
                source[0] = len(fused) + len(pages)
                pages.append(int(table[(first - 1) // self._page_tokens]))
            seq.hidden = None
            if first > last:
                continue
            parts.append(self._part(seq, first, last + 1 - first))
            tokens.append(seq.buffer[first : last + 1].astype(np.int64))
            sources.append(source)
            rows += len(source)
            if d.drawn:
                ends.append((seq, rows - 1))
        all_sources = torch.cat((fused, carry.index_select(0, self._tensor(pages))))
        self._keep_carry(done, fused)
        for pool in (self._pools["k"][0], self._pools["v"][0]):
            pool.flatten(0, 1).index_fill_(0, self._tensor(holes), 0)
        if not parts:
            return
        hidden = self._draft.forward(
            torch.from_numpy(np.concatenate(tokens)).to(self._device),
            all_sources.index_select(0, torch.from_numpy(np.concatenate(sources)).to(self._device)),
            self._layout(parts),
            self._pools,
        )
        for (seq, _), state in zip(ends, hidden[[row for _, row in ends]], strict=True):
            seq.hidden = state

    def _keep_carry(self, done: Seq[Rebuild], fused: Tensor) -> None:
        """Store the feature of each page's last final token, whole page or not."""
        size = self._page_tokens
        slots, rows = [], []
        for d in done:
            table = self._table(d.seq)
            for page in range(d.old // size, -(-d.seq.computed // size)):
                token = min((page + 1) * size, d.seq.computed) - 1
                slots.append(int(table[page]))
                rows.append(d.offset + token - d.old)
        self._pools["carry"][0].index_copy_(
            0, self._tensor(slots), fused.index_select(0, self._tensor(rows))
        )

    def _table(self, seq: Sequence) -> NDArray[np.int32]:
        assert seq.lease is not None
        return seq.lease.slots(self._group)

    def _part(self, seq: Sequence, start: int, rows: int) -> Part:
        return Part(self._table(seq), start, rows, seq.draft_from)

    def _row(self, table: NDArray[np.int32], position: int) -> int:
        page, offset = divmod(position, self._page_tokens)
        return int(table[page]) * self._page_tokens + offset

    def _layout(self, parts: Seq[Part]) -> Layout:
        return Layout.of(parts, self._page_tokens, self._device)

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)
