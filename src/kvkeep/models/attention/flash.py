"""Paged attention by PyTorch's flash attention, where ``varlen_attn`` takes a block table.

Support depends on PyTorch's version, the device, the page size and the head size. So a small case
is tried first and compared with our own kernel.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .blocks import Blocks
from .interface import Scoring

_NEEDED = {"block_table", "enable_gqa", "return_aux", "scale", "seqused_k"}


def takes(query: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, scoring: Scoring) -> bool:
    """Whether :func:`attend` can compute this: plain attention, several rows of a sequence.

    Sliding windows and gaps are excluded: flash attention would read pages that have no slots.
    """
    return (
        query.is_cuda
        and blocks.longest > 1
        and not blocks.gaps
        and blocks.window is None
        and scoring.softcap is None
        and query.dtype == keys.dtype == values.dtype
        and keys.shape == values.shape
        and _works(query.device, query.dtype, query.shape[1], tuple(keys.shape[1:]))
    )


def attend(query: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, scoring: Scoring) -> Tensor:
    """See :meth:`~kvkeep.models.attention.interface.AttentionPlan.attend`."""
    from torch.nn.attention import varlen

    ends = blocks.positions[blocks.begins[1:].long() - 1] + 1
    out, total = varlen.varlen_attn(
        query, keys, values, blocks.begins, None, blocks.longest, blocks.capacity,
        return_aux=varlen.AuxRequest(lse=True), scale=scoring.scale, window_size=(-1, 0),
        enable_gqa=True, seqused_k=ends.int(), block_table=blocks.tables,
    )  # fmt: skip
    if scoring.sinks is None:
        return out
    share = torch.sigmoid(total - scoring.sinks.float()[:, None])  # [heads, rows]
    return out * share.T[..., None].to(out.dtype)


@cache
def _works(device: torch.device, dtype: torch.dtype, heads: int, page: tuple[int, ...]) -> bool:
    """Try two sequences with scattered pages and sinks; ``page``: tokens, kv_heads, head_dim."""
    if not _NEEDED.issubset(_parameters()):
        return False
    size, generator = page[0], torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, device=device, dtype=dtype)

    positions = ints(2 * size - 2, 2 * size - 1, 0, dtype=torch.int64)  # index: unused
    blocks = Blocks(
        positions, positions, ints((2, 0), (1, 1)), ints(0, 0), ints(0, 2, 3), size, None,
        longest=2, gaps=False, counts=np.array((2, 1)),
    )  # fmt: skip
    query, keys, values = random(3, heads, page[2]), random(3, *page), random(3, *page)
    scoring = Scoring(page[2] ** -0.5, sinks=random(heads))
    expected = kernels.attend(query, keys, values, blocks, scoring, 1)
    try:
        found = attend(query, keys, values, blocks, scoring)
    except (RuntimeError, TypeError, ValueError):
        return False
    return torch.allclose(found, expected, rtol=2e-2, atol=2e-2)


@cache
def _parameters() -> tuple[str, ...]:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return ()
    return tuple(inspect.signature(varlen_attn).parameters)
