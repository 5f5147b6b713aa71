"""Paged attention against plain attention, one query row at a time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kvkeep.models.attention.device import attention_on
from kvkeep.models.attention.interface import Attention, Part, Scoring

ATTENTION = attention_on(torch.device("cpu"))
PAGE, SLOTS, DIM, SCALE = 4, 40, 8, 0.3
CASES = [(0, 1, 0), (0, 9, 0), (7, 1, 0), (12, 6, 0), (5, 4, 3), (16, 1, 13), (3, 1, 3), (1, 8, 1)]
"""Start, rows and first visible position of the sequences in one packed batch."""


class Options(NamedTuple):
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


WINDOW = 6
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": Options(),
    "window": Options(window=WINDOW),
    "softcap": Options(softcap=0.5),
    "sinks": Options(sinks=SINKS),
    "all": Options(WINDOW, 0.5, SINKS),
}


def plain(
    query: Tensor, keys: Tensor, values: Tensor, start: int, first: int, options: Options
) -> Tensor:
    """``[rows, heads, dim]`` over keys and values ``[end, kv_heads, dim]``, in float64."""
    group = query.shape[1] // keys.shape[1]
    wide = [x.double().repeat_interleave(group, 1) for x in (keys, values)]
    out = []
    for i, row in enumerate(query.double()):
        end = start + i + 1
        begin = first if options.window is None else max(first, end - options.window)
        k, v = (x[begin:end] for x in wide)
        scores = torch.einsum("hd,khd->hk", row, k) * SCALE
        if options.softcap is not None:
            scores = (scores / options.softcap).tanh() * options.softcap
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks.double()[:, None]), -1)
            v = torch.cat((v, torch.zeros_like(v[:1])))
        out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v))
    return torch.stack(out)


def packed(
    seed: int, kv_heads: int, dtype: torch.dtype, window: int | None = None
) -> tuple[list[Part], list[Tensor]]:
    """The cases in random slots; and per sequence its query, keys and values."""
    free = np.random.default_rng(seed).permutation(SLOTS).astype(np.int32)
    generator = torch.Generator().manual_seed(0)
    parts, state = [], []
    for start, rows, first in CASES:
        pages = -(-(start + rows) // PAGE)
        table = free[: pages + 1].copy()  # one page of capacity beyond
        reach = first if window is None else max(first, start - window + 1)
        table[: reach // PAGE] = -1  # out of reach: no slot
        parts.append(Part(table, start, rows, first))
        free = free[pages + 1 :]
        state += [torch.randn(rows, 4, DIM, generator=generator).to(dtype)]
        state += [
            torch.randn(start + rows, kv_heads, DIM, generator=generator).to(dtype) for _ in "kv"
        ]
    return parts, state


def run(
    parts: list[Part],
    state: list[Tensor],
    options: Options = OPTIONS["plain"],
    kept: torch.dtype | None = None,
    attention: Attention = ATTENTION,
) -> Tensor:
    """Fill pools that hold NaN wherever nothing may be read, then attend.

    Pools have the dtype ``kept``, or else that of keys and values.
    """
    queries, keys, values = state[0::3], state[1::3], state[2::3]
    pools = []
    for rows in (keys, values):
        pool = rows[0].new_full((SLOTS, PAGE, *rows[0].shape[1:]), torch.nan)
        pool = pool.to(kept or rows[0].dtype)
        firsts = [max(p.first, np.count_nonzero(p.table < 0) * PAGE) for p in parts]
        before = [
            Part(p.table, first, p.start - first)
            for p, first in zip(parts, firsts, strict=True)
            if p.start > first
        ]
        old = [x[first : p.start] for x, p, first in zip(rows, parts, firsts, strict=True)]
        attention.plan(before, PAGE).write(pool, torch.cat(old))
        pools.append(pool)
    plan = attention.plan(parts, PAGE, options.window)
    for pool, rows in zip(pools, (keys, values), strict=True):
        plan.write(pool, torch.cat([x[p.start :] for x, p in zip(rows, parts, strict=True)]))
    return plan.attend(torch.cat(queries), *pools, Scoring(SCALE, options.softcap, options.sinks))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
def test_packed_rows_equal_plain_attention(
    name: str, kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    options = OPTIONS[name]
    parts, state = packed(0, kv_heads, dtype, options.window)
    found = run(parts, state, options)
    expected = torch.cat(
        [
            plain(*state[3 * i : 3 * i + 3], part.start, part.first, options)
            for i, part in enumerate(parts)
        ]
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_pools_of_another_dtype_round_once(kept: torch.dtype) -> None:
    parts, state = packed(0, 2, torch.float32)
    state[1][0] = 1e6  # saturates where that is too large
    largest = torch.finfo(kept).max
    rounded = [
        x if i % 3 == 0 else x.clamp(-largest, largest).to(kept).float()
        for i, x in enumerate(state)
    ]
    assert torch.equal(run(parts, state, kept=kept), run(parts, rounded))


def test_slots_do_not_change_a_bit() -> None:
    first, second = (run(*packed(seed, 2, torch.float32)) for seed in (1, 2))
    assert torch.equal(first, second)


def test_positions_of_a_plan_and_where_it_writes() -> None:
    table = np.array([5, 2, 9], np.int32)
    plan = ATTENTION.plan([Part(table, 3, 3), Part(table[::-1].copy(), 0, 1)], PAGE)
    assert plan.positions.tolist() == [3, 4, 5, 0]
    pool = torch.zeros(SLOTS, PAGE)
    plan.write(pool, torch.arange(1.0, 5.0))
    assert pool.nonzero().tolist() == [[2, 0], [2, 1], [5, 3], [9, 0]]
    assert pool[pool > 0].tolist() == [2, 3, 1, 4]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("first", [0, 1])
def test_sequences_with_a_prefix_in_common(name: str, first: int) -> None:
    """Two families of sequences, of single rows, verified rows and a chunk, and one of neither."""
    options, common, generator = OPTIONS[name], 70, torch.Generator().manual_seed(1)
    pools = [torch.full((500, PAGE, 2, DIM), torch.nan) for _ in "kv"]
    free = np.random.default_rng(3).permutation(500).astype(np.int32)
    parts, expected, new, queries = [], [], [], []
    for family in (
        ((3, 1), (40, 5), (41, 5), (9, 1)),
        ((0, 30), (2, 1), (2, 1), (4, 1)),
        ((5, 2),),
    ):
        prefix, free = free[:common], free[common:]
        shared = [torch.randn(common * PAGE, 2, DIM, generator=generator) for _ in "kv"]
        for more, rows in family:
            start, end = common * PAGE + more, common * PAGE + more + rows
            own, free = free[: -(-(more + rows) // PAGE)], free[-(-(more + rows) // PAGE) :]
            parts.append(Part(np.concatenate((prefix, own)), start, rows, first))
            query = torch.randn(rows, 4, DIM, generator=generator)
            state = [
                torch.cat((x, torch.randn(more + rows, 2, DIM, generator=generator)))
                for x in shared
            ]
            old = ATTENTION.plan([Part(parts[-1].table, first, start - first)], PAGE)
            for pool, x in zip(pools, state, strict=True):
                old.write(pool, x[first:start])
            expected.append(plain(query, *state, start, first, options))
            queries.append(query)
            new.append([x[start:end] for x in state])
    plan = ATTENTION.plan(parts, PAGE, options.window)
    for pool, rows in zip(pools, zip(*new, strict=True), strict=True):
        plan.write(pool, torch.cat(rows))
    scoring = Scoring(0.3, options.softcap, options.sinks)
    found = plan.attend(torch.cat(queries), *pools, scoring)
    torch.testing.assert_close(found.double(), torch.cat(expected), atol=1e-6, rtol=1e-6)
    seen = [plan.gather(pool, pool.dtype) for pool in pools]
    assert torch.equal(plan.attend_to(torch.cat(queries), *seen, scoring), found)
    assert not torch.cat(seen).isnan().any()
    if options.window is None:  # common tokens are read once in each family
        assert len(seen[0]) < sum(part.start + part.rows for part in parts) / 2
