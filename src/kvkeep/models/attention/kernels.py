"""Attention over block tables, as two Triton kernels.

The first computes an online softmax over blocks of keys (Dao et al., FlashAttention, 2022), which
it reads through a block table (Kwon et al., PagedAttention, 2023). Query heads that share a key
head become rows of one matrix product. When rows are few, several programs split the keys of each,
and the second kernel merges their results by the log-sum-exp of the scores (flash decoding: Dao et
al., 2023).

Tests run both on a CPU with Triton's interpreter (``TRITON_INTERPRET=1``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import Blocks
from .interface import Scoring

_TILE = 64  # rows of a matrix product; more if a key head has more query heads than this
_KEYS = 1 << 14  # bytes of a block of keys, and of a block of values, to fit shared memory
_SPLITS = 32  # most programs that share a row


def attend(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, scoring: Scoring, programs: int
) -> Tensor:
    """See :meth:`~kvkeep.models.attention.interface.AttentionPlan.attend`.

    Args:
        programs: enough to keep the device busy; keys are split until there are this many.
    """
    (rows, heads, dim), (kv_heads, value_dim) = query.shape, values.shape[2:]
    group, capacity = heads // kv_heads, blocks.capacity
    width = [max(16, triton.next_power_of_2(x)) for x in (dim, value_dim)]
    length = max(16, min(64, _KEYS // (max(width) * query.element_size())))
    tile = min(triton.next_power_of_2(blocks.longest), max(1, _TILE // group))
    tiles = blocks.tiles(tile)
    most = min(_SPLITS, programs // (len(tiles) * kv_heads), capacity // (2 * length))
    splits = 1 << max(1, most).bit_length() - 1  # a power of two
    product = max(16, triton.next_power_of_2(tile * group))

    out = query.new_empty(rows, heads, value_dim)
    whole = splits == 1 and scoring.sinks is None
    parts = out[None] if whole else out.new_empty(splits, *out.shape, dtype=torch.float32)
    totals = out.new_empty(splits, rows, heads, dtype=torch.float32)
    _attend[len(tiles), kv_heads, splits](
        parts, totals, query, keys, values,
        blocks.tables, tiles, blocks.begins, blocks.positions, blocks.firsts,
        parts.stride(0), parts.stride(1), totals.stride(0), totals.stride(1),
        query.stride(0), query.stride(1), blocks.tables.stride(0),
        *keys.stride()[:3], *values.stride()[:3],
        scoring.scale, scoring.softcap or 0.0,
        PAGE=blocks.page_tokens, WINDOW=blocks.window or 0, SOFTCAP=scoring.softcap is not None,
        GROUP=group, ROWS=tile, M=product, N=length,
        DIM=dim, VALUE_DIM=value_dim, D=width[0], V=width[1],
        num_warps=8 if product * width[1] > 1 << 13 else 4, num_stages=3,
    )  # fmt: skip
    if not whole:
        _merge[rows, heads](
            out, parts, totals, scoring.sinks, parts.stride(0), totals.stride(0),
            SINKS=scoring.sinks is not None, SPLITS=splits, DIM=value_dim, D=width[1],
        )  # fmt: skip
    return out


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    out, total, query, keys, values, tables, tiles, begins, positions, firsts,
    out_split, out_row, total_split, total_row, query_row, query_head, table_row,
    key_slot, key_token, key_head, value_slot, value_token, value_head,
    scale, softcap,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, D: tl.constexpr, V: tl.constexpr,  # noqa: N803
):
    """Attend up to ``ROWS`` rows of one sequence, for one key head, over one split of its keys.

    Row ``m`` of the matrix products is row ``m // GROUP`` of the tile, query head ``m % GROUP``.
    """
    tile, kv_head, split, splits = (
        tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    )
    sequence, skip = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    row = tl.load(begins + sequence) + skip  # the tile's first packed row
    count = tl.minimum(tl.load(begins + sequence + 1) - row, ROWS)
    position = tl.load(positions + row).to(tl.int32)

    m = tl.arange(0, M)
    head = kv_head * GROUP + m % GROUP
    live = m < count * GROUP
    rows = (row + m // GROUP).to(tl.int64)
    own = position + m // GROUP  # each row's own position
    d, v = tl.arange(0, D), tl.arange(0, V)
    at = rows * query_row + head * query_head
    q = tl.load(query + at[:, None] + d, mask=live[:, None] & (d < DIM), other=0.0)

    begin, end = tl.load(firsts + sequence), position + count
    if WINDOW > 0:
        begin = tl.maximum(begin, position - WINDOW + 1)
    piece = tl.cdiv(tl.cdiv(end - begin, splits), N) * N
    begin += split * piece
    end = tl.minimum(end, begin + piece)

    top = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, V], tl.float32)
    for n in range(begin, end, N):
        seen = n + tl.arange(0, N)
        there = seen < end
        slot = tl.load(tables + sequence * table_row + seen // PAGE, mask=there, other=0)
        slot = slot.to(tl.int64)
        k = tl.load(
            keys + slot[None, :] * key_slot + (seen % PAGE)[None, :] * key_token
            + kv_head * key_head + d[:, None],
            mask=there[None, :] & (d < DIM)[:, None], other=0.0,
        ).to(q.dtype)
        score = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:
            score = softcap * (2 * tl.sigmoid(2 * score / softcap) - 1)  # tanh
        visible = there[None, :] & (seen[None, :] <= own[:, None])
        if WINDOW > 0:
            visible &= seen[None, :] > own[:, None] - WINDOW
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: the row saw no key yet
        share = tl.exp(score - base[:, None])
        shrink = tl.exp(top - base)
        x = tl.load(
            values + slot[:, None] * value_slot + (seen % PAGE)[:, None] * value_token
            + kv_head * value_head + v[None, :],
            mask=there[:, None] & (v < VALUE_DIM)[None, :], other=0.0,
        ).to(q.dtype)
        mixed = mixed * shrink[:, None] + tl.dot(share.to(q.dtype), x, input_precision="ieee")
        mass = mass * shrink + tl.sum(share, 1)
        top = higher

    mass = tl.where(mass > 0, mass, 1.0)  # a row that saw no key gets zeros of weight 0
    mixed /= mass[:, None]
    at = split * out_split + rows * out_row + head * VALUE_DIM
    mask = live[:, None] & (v < VALUE_DIM)
    tl.store(out + at[:, None] + v, mixed.to(out.dtype.element_ty), mask=mask)
    tl.store(total + split * total_split + rows * total_row + head, top + tl.log(mass), mask=live)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out, parts, totals, sinks, part_split, total_split,
    SINKS: tl.constexpr, SPLITS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,  # noqa: N803
):
    """Merge the splits of one row and head, each weighted by its share of the softmax mass."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + head
    split, d = tl.arange(0, SPLITS), tl.arange(0, D)
    total = tl.load(totals + split * total_split + at)
    top = tl.max(total, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    weight = tl.exp(total - top)
    mass = tl.sum(weight, 0)
    if SINKS:
        mass += tl.exp(sink - top)
    part = tl.load(parts + split[:, None] * part_split + at * DIM + d, mask=d < DIM, other=0.0)
    mixed = tl.sum(part * weight[:, None], 0) / mass
    tl.store(out + at * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)
# fmt: on
