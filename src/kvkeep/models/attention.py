"""Paged attention in plain PyTorch: packed rows of many sequences against page pools.

A pool is ``[slots, page_tokens, *row]``, for keys and values ``row`` is ``(kv_heads, head_dim)``; a
sequence's *table* maps its pages to slots. What is seen is gathered in position order into fresh
buffers, so a result depends on what the pages hold and never on where they lie. A pool may have
another dtype than the rows: they are rounded when written and widened when gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    @classmethod
    def of(cls, part: Part, page_tokens: int, device: torch.device, window: int | None) -> Span:
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
        return cls(part.rows, pages.to(device), seen, mask)


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
        return cls(
            torch.from_numpy(np.concatenate(positions)).to(device),
            torch.from_numpy(np.concatenate(index)).to(device),
            tuple(Span.of(part, page_tokens, device, window) for part in parts),
        )


def write(pool: Tensor, rows: Tensor, layout: Layout) -> None:
    """Store ``rows [rows, *row]`` where ``layout`` says; what is too large saturates."""
    flat = pool.flatten(0, 1)
    if rows.dtype != pool.dtype:
        limit = torch.finfo(pool.dtype).max
        rows = rows.clamp(-limit, limit).to(pool.dtype)
    if pool.element_size() == 1:  # PyTorch cannot index bytes that are numbers
        flat, rows = flat.view(torch.uint8), rows.view(torch.uint8)
    flat.index_copy_(0, layout.index, rows)


def gather(pool: Tensor, span: Span, dtype: torch.dtype) -> Tensor:
    """``[seen, *row]`` in ``dtype``: what the rows of ``span`` may see, in position order."""
    return pool.index_select(0, span.pages).flatten(0, 1)[span.seen].to(dtype)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each row over what it sees of its sequence, the row itself included.

    Args:
        query: ``[rows, heads, head_dim]``; ``heads`` is a multiple of the pools' kv_heads.
        keys, values: pools that already hold the rows' own keys and values.
        scale: factor on the scores.
        softcap: scores ``s`` become ``softcap * tanh(s / softcap)`` (Gemma 2).
        sinks: ``[heads]``, one more score of each head, for nothing (gpt-oss).

    Returns:
        ``[rows, heads, value dim]``.
    """
    seen = (
        (gather(keys, span, query.dtype), gather(values, span, query.dtype))
        for span in layout.spans
    )
    return attend_to(query, seen, layout, scale, softcap, sinks)


def attend_to(
    query: Tensor,
    seen: Iterable[tuple[Tensor, Tensor]],
    layout: Layout,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`attend` over keys and values that are at hand.

    Args:
        seen: of each span ``[seen, kv_heads, dim]``, keys and values.
    """
    rows = torch.split(query, [span.rows for span in layout.spans])
    return torch.cat(
        [
            _mix(q, k, v, span.mask, scale, softcap, sinks)
            for q, (k, v), span in zip(rows, seen, layout.spans, strict=True)
        ]
    )


def _mix(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """One span. Query heads that share a key head become rows: ``[kv_heads, all rows, dim]``."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    q = query.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).flatten(1, 2)
    k, v = keys.transpose(0, 1), values.transpose(0, 1)
    if mask is not None:
        mask = mask.repeat(heads // kv_heads, 1)
    if softcap is None and sinks is None:
        mixed = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=scale
        )[0]
    else:
        scores = (q @ k.transpose(1, 2)).float() * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(kv_heads, -1, 1).repeat_interleave(rows, 1)
            scores = torch.cat((scores, sink), -1)
        mixed = scores.softmax(-1)[..., : len(keys)].to(v.dtype) @ v
    return mixed.view(kv_heads, -1, rows, values.shape[2]).permute(2, 0, 1, 3).flatten(1, 2)
