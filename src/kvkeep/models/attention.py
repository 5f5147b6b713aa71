"""Paged attention in plain PyTorch: packed rows of many sequences against page pools.

A pool is ``[slots, page_tokens, kv_heads, head_dim]``; a sequence's *table* maps its pages to
slots. Keys and values are gathered in position order into fresh buffers, so a result depends on
what the pages hold and never on where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows in a packed batch, and what they may see.

    ::

        first                 start               start + rows
          |  seen by all rows   |  seen causally       |
          (of a window, row i sees its last ``window`` positions, itself included)
    """

    table: NDArray[np.int32]  # page -> slot; covers start + rows
    start: int  # position of the first row
    rows: int
    first: int = 0  # positions before are never read, their whole pages may have no slot


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A :class:`Part`, ready for the device."""

    rows: int
    pages: Tensor  # [pages] int64 slots, from the page of the first visible position on
    seen: slice  # what of those pages' tokens is visible to any row
    mask: Tensor | None  # [rows, seen] bool, True is visible; None: all is


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the rows of a packed batch go in a pool. Built once per step, used by every layer."""

    positions: Tensor  # [rows] int64, of each row in its sequence
    index: Tensor  # [rows] int64, slot * page_tokens + offset
    spans: tuple[Span, ...]

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        page_tokens: int,
        device: torch.device,
        window: int | None = None,
    ) -> Layout:
        """Lay out ``parts`` one after another.

        Args:
            window: positions that a row sees, its own included; None: all up to its own.
        """
        positions = [np.arange(p.start, p.start + p.rows) for p in parts]
        index = [
            p.table[at // page_tokens].astype(np.int64) * page_tokens + at % page_tokens
            for p, at in zip(parts, positions, strict=True)
        ]
        spans = []
        for part in parts:
            reach = 0 if window is None else part.start - window + 1  # of the first row
            first, end = max(part.first, reach), part.start + part.rows
            skip = first // page_tokens
            pages = torch.from_numpy(part.table[skip : -(-end // page_tokens)].astype(np.int64))
            mask = None
            if part.rows > 1:
                mask = torch.ones(part.rows, end - first, dtype=torch.bool, device=device)
                mask = mask.tril(part.start - first)
                if window is not None:
                    mask = mask.triu(reach - first)
            seen = slice(first - skip * page_tokens, end - skip * page_tokens)
            spans.append(Span(part.rows, pages.to(device), seen, mask))
        return cls(
            torch.from_numpy(np.concatenate(positions)).to(device),
            torch.from_numpy(np.concatenate(index)).to(device),
            tuple(spans),
        )


def write(pool: Tensor, rows: Tensor, layout: Layout) -> None:
    """Store ``rows [rows, kv_heads, head_dim]`` where ``layout`` says."""
    pool.flatten(0, 1).index_copy_(0, layout.index, rows)


def attend(query: Tensor, keys: Tensor, values: Tensor, layout: Layout, scale: float) -> Tensor:
    """Causal attention of each row over its sequence, the row itself included.

    Args:
        query: ``[rows, heads, head_dim]``; ``heads`` is a multiple of the pools' kv_heads.
        keys, values: pools that already hold the rows' own keys and values.
        scale: factor on the scores.

    Returns:
        ``[rows, heads, head_dim]``.
    """
    heads, kv_heads, dim = query.shape[1], keys.shape[2], query.shape[2]
    out = torch.empty_like(query)
    begin = 0
    for span in layout.spans:
        part = slice(begin, begin + span.rows)
        k, v = (
            pool.index_select(0, span.pages).flatten(0, 1)[span.seen].transpose(0, 1)[None]
            for pool in (keys, values)
        )
        # Query heads that share a key head become rows: [1, kv_heads, group * rows, head_dim].
        grouped = query[part].reshape(-1, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        mask = None if span.mask is None else span.mask.repeat(grouped.shape[1], 1)
        mixed = functional.scaled_dot_product_attention(
            grouped.flatten(1, 2)[None], k, v, attn_mask=mask, scale=scale
        )
        out[part] = mixed[0].view(grouped.shape).permute(2, 0, 1, 3).flatten(1, 2)
        begin = part.stop
    return out
