"""Paged attention against plain attention, one query row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kvkeep.models.attention import Layout, Part, attend, write

PAGE, SLOTS, DIM = 4, 40, 8
CASES = [(0, 1, 0), (0, 9, 0), (7, 1, 0), (12, 6, 0), (5, 4, 3), (16, 1, 13), (3, 1, 3), (1, 8, 1)]
"""Start, rows and first visible position of the sequences in one packed batch."""


def plain(query: Tensor, keys: Tensor, values: Tensor, start: int, first: int) -> Tensor:
    """``[rows, heads, dim]`` over keys and values ``[end, kv_heads, dim]``, in float64."""
    group = query.shape[1] // keys.shape[1]
    wide = [x.double().repeat_interleave(group, 1) for x in (keys, values)]
    out = []
    for i, row in enumerate(query.double()):
        k, v = (x[first : start + i + 1] for x in wide)
        weights = (torch.einsum("hd,khd->hk", row, k) * 0.3).softmax(-1)
        out.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(out)


def packed(seed: int, kv_heads: int, dtype: torch.dtype) -> tuple[list[Part], list[Tensor]]:
    """The cases in random slots; and per sequence its query, keys and values."""
    free = np.random.default_rng(seed).permutation(SLOTS).astype(np.int32)
    generator = torch.Generator().manual_seed(0)
    parts, state = [], []
    for start, rows, first in CASES:
        pages = -(-(start + rows) // PAGE)
        table = free[: pages + 1].copy()  # one page of capacity beyond
        table[: first // PAGE] = -1  # out of reach: no slot
        parts.append(Part(table, start, rows, first))
        free = free[pages + 1 :]
        state += [torch.randn(rows, 4, DIM, generator=generator).to(dtype)]
        state += [
            torch.randn(start + rows, kv_heads, DIM, generator=generator).to(dtype) for _ in "kv"
        ]
    return parts, state


def run(parts: list[Part], state: list[Tensor]) -> Tensor:
    """Fill pools that hold NaN wherever nothing may be read, then attend."""
    queries, keys, values = state[0::3], state[1::3], state[2::3]
    pools = []
    for rows in (keys, values):
        pool = torch.full((SLOTS, PAGE, *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype)
        before = [Part(p.table, p.first, p.start - p.first) for p in parts if p.start > p.first]
        old = [x[p.first : p.start] for x, p in zip(rows, parts, strict=True)]
        write(pool, torch.cat(old), Layout.of(before, PAGE, pool.device))
        pools.append(pool)
    layout = Layout.of(parts, PAGE, pools[0].device)
    for pool, rows in zip(pools, (keys, values), strict=True):
        write(pool, torch.cat([x[p.start :] for x, p in zip(rows, parts, strict=True)]), layout)
    return attend(torch.cat(queries), *pools, layout, 0.3)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
def test_packed_rows_equal_plain_attention(
    kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    parts, state = packed(0, kv_heads, dtype)
    found = run(parts, state)
    expected = torch.cat(
        [plain(*state[3 * i : 3 * i + 3], part.start, part.first) for i, part in enumerate(parts)]
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_slots_do_not_change_a_bit() -> None:
    first, second = (run(*packed(seed, 2, torch.float32)) for seed in (1, 2))
    assert torch.equal(first, second)


def test_positions_and_rows_of_a_layout() -> None:
    table = np.array([5, 2, 9], np.int32)
    layout = Layout.of(
        [Part(table, 3, 3), Part(table[::-1].copy(), 0, 1)], PAGE, torch.device("cpu")
    )
    assert layout.positions.tolist() == [3, 4, 5, 0]
    assert layout.index.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 9 * 4]
