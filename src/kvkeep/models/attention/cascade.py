"""Paged attention in plain PyTorch: made for a CPU, correct on any device.

It gathers keys and values in order of position into a buffer that fits the processor's cache. So a
result depends on what the pages hold, never on which slots they have. (Reading consecutive slots in
place was measured to be slower.) Query heads that share a key head become rows.

A prefix that several sequences share is attended to once, for all their rows. The log-sum-exp of
the scores merges this with the rest of what each row sees (cascade inference: Ye et al.,
FlashInfer, 2024). So a result may differ by rounding from that of a sequence alone, as matrix
products of different sizes do anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import Part, Scoring
from .layout import Layout, Span, lay_out


class CascadeAttention:
    """An :class:`~kvkeep.models.attention.interface.Attention`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(
        self, parts: Sequence[Part], page_tokens: int, window: int | None = None
    ) -> CascadePlan:
        return CascadePlan(lay_out(parts, page_tokens, window, self._device))


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """A :class:`~kvkeep.models.attention.interface.AttentionPlan`."""

    layout: Layout

    @property
    def positions(self) -> Tensor:
        return self.layout.positions

    def write(self, pool: Tensor, rows: Tensor) -> None:
        write_rows(pool, self.layout.index, rows)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        return self._attend(query, self._pairs(keys, values, query.dtype), scoring)

    def gather(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.cat([_read(pool, span) for span in self._spans]).to(dtype)

    def attend_to(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        counts = [span.count * span.length for span in self._spans]
        seen = zip(*(torch.split(x, counts) for x in (keys, values)), strict=True)
        return self._attend(query, seen, scoring)

    @property
    def _spans(self) -> tuple[Span, ...]:
        return self.layout.spans + self.layout.runs

    def _pairs(
        self, keys: Tensor, values: Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values ``[seen, kv_heads, dim]`` of each span, in a buffer that all share."""
        most = max(len(span.seen) * span.unit for span in self._spans)
        k, v = (pool.new_empty(most, *pool.shape[2:]) for pool in (keys, values))
        for span in self._spans:
            yield _read(keys, span, k).to(dtype), _read(values, span, v).to(dtype)

    def _attend(
        self, query: Tensor, seen: Iterable[tuple[Tensor, Tensor]], scoring: Scoring
    ) -> Tensor:
        """Attention over keys and values ``[seen, kv_heads, dim]`` of each span, then each run."""
        layout, pairs = self.layout, iter(seen)
        query = query.index_select(0, layout.order)
        mixed = [_mix(query[span.rows], span, *next(pairs), scoring) for span in layout.spans]
        out, total = (torch.cat(one) for one in zip(*mixed, strict=True))
        for run in layout.runs:
            more, its = _mix(query[run.rows], run, *next(pairs), scoring)
            mine = total[run.rows]
            out[run.rows].lerp_(more, torch.sigmoid(its - mine)[..., None].to(out.dtype))
            total[run.rows] = torch.logaddexp(its, mine)
        if scoring.sinks is not None:
            sinks = scoring.sinks.float().view(total.shape[1:])
            out *= torch.sigmoid(total - sinks)[..., None].to(out.dtype)
        out = out.flatten(1, 2)
        return torch.empty_like(out).index_copy_(0, layout.order, out)


def _read(pool: Tensor, span: Span, buffer: Tensor | None = None) -> Tensor:
    """``[seen, *row]``: what a span sees, in ``buffer [tokens, *row]`` or a new tensor."""
    row, units = pool.shape[2:], span.seen.shape[0]
    if buffer is not None:
        buffer = buffer[: units * span.unit].view(units, span.unit, *row)
    read = torch.index_select(pool.view(-1, span.unit, *row), 0, span.seen, out=buffer)
    return read.view(-1, *row)[span.skip : span.skip + span.count * span.length]


def write_rows(pool: Tensor, index: Tensor, rows: Tensor) -> None:
    """Store ``rows [rows, *row]`` at ``index [rows]`` of ``pool``, flattened over its pages."""
    flat = pool.flatten(0, 1)
    if rows.dtype != pool.dtype:
        limit = torch.finfo(pool.dtype).max
        rows = rows.clamp(-limit, limit).to(pool.dtype)
    if pool.element_size() == 1:  # PyTorch cannot index tensors of an 8-bit float dtype
        flat, rows = flat.view(torch.uint8), rows.view(torch.uint8)
    flat.index_copy_(0, index, rows)


def _mix(
    query: Tensor, span: Span, keys: Tensor, values: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attention of one span's rows over its keys and values.

    Query heads that share a key head become rows, so a key is read once for all of them.

    Returns:
        Outputs ``[rows, kv_heads, query heads per key head, value dim]``, and the log-sum-exp of
        the scores ``[rows, kv_heads, query heads per key head]`` float32.
    """
    (packed, heads, dim), kv_heads, mask = query.shape, keys.shape[1], span.mask
    rows = packed // span.count  # of each sequence
    q = query.view(span.count, rows, kv_heads, heads // kv_heads, dim).transpose(1, 2).flatten(2, 3)
    k, v = (x.view(span.count, span.length, kv_heads, -1).transpose(1, 2) for x in (keys, values))
    if mask is not None and rows > 1:
        mask = mask.repeat_interleave(heads // kv_heads, 2)
    if scoring.softcap is None and query.is_cpu and keys.shape == values.shape:
        out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scoring.scale
        )
    else:
        scores = (q @ k.transpose(2, 3)).float() * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if mask is not None:
            scores += mask
        total = scores.logsumexp(-1)
        out = (scores - total[..., None]).exp().to(v.dtype) @ v
    if rows == 1:
        return out, total
    shape = (span.count, kv_heads, rows, -1)
    out, total = (x.view(*shape, *x.shape[3:]).transpose(1, 2).flatten(0, 1) for x in (out, total))
    return out, total
