"""Paged attention in plain PyTorch: made for a CPU, right on any device.

What rows see is gathered in position order into a buffer that stays in the processor's cache, so a
result depends on what the pages hold and never on where they lie. (Reading runs of consecutive
slots in place was measured: it is slower.) Query heads that share a key head become rows.

A run that sequences have in common is attended to once, with all their rows, and the result merged
with that of each row's rest by the log-sum-exp of the scores (cascade inference: Ye et al.,
FlashInfer, 2024). So a result may differ by rounding from that of a sequence alone, as it does
anyway between matrix products of different sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Part, Scoring
from .layout import Layout, Span, lay_out


class TorchAttention:
    """An :class:`~kvkeep.models.attention.Attention`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, parts: Sequence[Part], page_tokens: int, window: int | None = None) -> TorchPlan:
        return TorchPlan(lay_out(parts, page_tokens, window, self._device))


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A :class:`~kvkeep.models.attention.Plan`."""

    layout: Layout

    @property
    def positions(self) -> Tensor:
        return self.layout.positions

    def write(self, pool: Tensor, rows: Tensor) -> None:
        flat = pool.flatten(0, 1)
        if rows.dtype != pool.dtype:
            limit = torch.finfo(pool.dtype).max
            rows = rows.clamp(-limit, limit).to(pool.dtype)
        if pool.element_size() == 1:  # PyTorch cannot index bytes that are numbers
            flat, rows = flat.view(torch.uint8), rows.view(torch.uint8)
        flat.index_copy_(0, self.layout.index, rows)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        return self._attend(query, self._read(keys, values, query.dtype), scoring)

    def gather(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        seen = torch.cat([span.seen.flatten() for span in self._spans])
        return pool.flatten(0, 1).index_select(0, seen).to(dtype)

    def attend_to(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        counts = [span.seen.numel() for span in self._spans]
        return self._attend(
            query, zip(*(torch.split(x, counts) for x in (keys, values)), strict=True), scoring
        )

    @property
    def _spans(self) -> tuple[Span, ...]:
        return self.layout.spans + self.layout.runs

    def _read(
        self, keys: Tensor, values: Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What each span sees, ``[seen, kv_heads, dim]``. It is gone when the next one is read."""
        most = max(span.seen.numel() for span in self._spans)
        places = [(p.flatten(0, 1), p.new_empty(most, *p.shape[2:])) for p in (keys, values)]
        for span in self._spans:
            seen = span.seen.flatten()
            k, v = (
                torch.index_select(pool, 0, seen, out=buffer[: len(seen)]).to(dtype)
                for pool, buffer in places
            )
            yield k, v

    def _attend(
        self, query: Tensor, seen: Iterable[tuple[Tensor, Tensor]], scoring: Scoring
    ) -> Tensor:
        """Over keys and values ``[seen, kv_heads, dim]`` of each span and run, in turn."""
        layout, pairs = self.layout, iter(seen)
        query = query.index_select(0, layout.order)
        mixed = [_mix(query, span, *next(pairs), scoring) for span in layout.spans]
        out, total = (torch.cat(one) for one in zip(*mixed, strict=True))
        for run in layout.runs:
            more, its = _mix(query, run, *next(pairs), scoring)
            mine = total[run.rows]
            out[run.rows].lerp_(more, torch.sigmoid(its - mine)[..., None].to(out.dtype))
            total[run.rows] = torch.logaddexp(its, mine)
        if scoring.sinks is not None:
            out *= torch.sigmoid(total - scoring.sinks.float())[..., None].to(out.dtype)
        return torch.empty_like(out).index_copy_(0, layout.order, out)


def _mix(
    query: Tensor, span: Span, keys: Tensor, values: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """The rows of one span: their values mixed ``[rows, heads, value dim]``, and the logarithm of
    the sum of their scores' exponentials ``[rows, heads]`` float32.

    Query heads that share a key head become rows, so a key is read once for them all.
    """
    query = query[span.rows]
    (rows, heads, dim), (count, length), kv_heads = query.shape, span.seen.shape, keys.shape[1]
    q = query.view(count, rows // count, kv_heads, -1, dim).transpose(1, 2).flatten(2, 3)
    k, v = (x.view(count, length, kv_heads, -1).transpose(1, 2) for x in (keys, values))
    mask = span.mask
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat_interleave(heads // kv_heads, 2)
    if scoring.softcap is None and q.is_cpu and k.shape[-1] == v.shape[-1]:
        mixed, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scoring.scale
        )
    else:
        scores = (q @ k.transpose(2, 3)).float() * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if mask is not None:
            scores += mask
        total = scores.logsumexp(-1)
        mixed = (scores - total[..., None]).exp().to(v.dtype) @ v
    mixed, total = (
        x.unflatten(2, (rows // count, -1)).transpose(1, 2).reshape(rows, heads, *x.shape[3:])
        for x in (mixed, total)
    )
    return mixed, total
