"""Attention by block tables against plain attention, its kernels in Triton's interpreter.

The interpreter's matrix product takes bfloat16 for integers, so rows are float32 or float16 here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from interpreted import DEVICE
from test_attention import CASES, DIM, OPTIONS, PAGE, SCALE, Options, packed, plain, run
from torch import Tensor
from torch.nn.attention import varlen

from kvkeep.models.attention import flash
from kvkeep.models.attention.cascade import CascadeAttention
from kvkeep.models.attention.interface import Part, Scoring
from kvkeep.models.attention.paged import PagedAttention

PAGED = PagedAttention(DEVICE)


def here(options: Options, state: list[Tensor]) -> tuple[Options, list[Tensor]]:
    """The same on the device."""
    sinks = options.sinks
    moved = options._replace(sinks=None if sinks is None else sinks.to(DEVICE))
    return moved, [x.to(DEVICE) for x in state]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=["f32", "bf16"]
)
def test_packed_rows_equal_plain_attention(
    name: str, kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter's matrix product takes bfloat16 for integers")
    parts, state = packed(0, kv_heads, dtype, OPTIONS[name].window)
    options, moved = here(OPTIONS[name], state)
    found = run(parts, moved, options, attention=PAGED)
    expected = [
        plain(*state[3 * i : 3 * i + 3], part.start, part.first, OPTIONS[name])
        for i, part in enumerate(parts)
    ]
    torch.testing.assert_close(
        found.double().cpu(), torch.cat(expected), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_pools_of_another_dtype_round_once(kept: torch.dtype) -> None:
    parts, state = packed(0, 2, torch.float32)
    _, state = here(Options(), state)
    rounded = [x if i % 3 == 0 else x.to(kept).float() for i, x in enumerate(state)]
    found = run(parts, state, kept=kept, attention=PAGED)
    assert torch.equal(found, run(parts, rounded, attention=PAGED))


def test_slots_do_not_change_a_bit() -> None:
    found = []
    for seed in (1, 2):
        parts, state = packed(seed, 2, torch.float32)
        found.append(run(parts, here(Options(), state)[1], attention=PAGED))
    assert torch.equal(*found)


def test_rows_are_laid_out_as_on_a_cpu() -> None:
    parts, _ = packed(0, 2, torch.float32)
    found, expected = (one(DEVICE).plan(parts, PAGE) for one in (PagedAttention, CascadeAttention))
    assert torch.equal(found.positions, expected.positions)
    pools = [torch.zeros(40, PAGE, device=DEVICE) for _ in range(2)]
    for plan, pool in zip((found, expected), pools, strict=True):
        rows = sum(rows for _, rows, _ in CASES)
        plan.write(pool, torch.arange(1.0, 1 + rows, device=DEVICE))
    assert torch.equal(*pools)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)], ids=["f32", "f16"]
)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_what_a_row_sees_may_be_split_over_programs(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    options = OPTIONS[name]._replace(window=None if name == "plain" else 140)
    generator = torch.Generator().manual_seed(0)
    start, query = 160, torch.randn(1, 4, DIM, generator=generator).to(dtype)
    keys, values = (
        torch.randn(start + 4, 2, DIM, generator=generator).to(dtype).unflatten(0, (-1, PAGE))
        for _ in "kv"
    )
    moved, state = here(options, [query, keys, values])
    plan = PAGED.plan([Part(np.arange(41, dtype=np.int32), start, 1)], PAGE, options.window)
    found = plan.attend(*state, Scoring(SCALE, moved.softcap, moved.sinks)).double().cpu()
    flat = [x.flatten(0, 1)[: start + 1] for x in (keys, values)]
    expected = plain(query, *flat, start, 0, options)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("right", [True, False])
def test_flash_attention_of_pytorch_is_tried_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """Its place is taken by what its documentation promises, or something close to it."""

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None,
        max_q: int, max_k: int, *, return_aux: object, scale: float, window_size: tuple[int, int],
        enable_gqa: bool, seqused_k: Tensor, block_table: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, totals = [], []
        for i, length in enumerate(seqused_k.tolist()):
            q = query[cu_seq_q[i] : cu_seq_q[i + 1]].transpose(0, 1)
            k, v = (
                x[block_table[i].long()].flatten(0, 1)[:length].transpose(0, 1)
                .repeat_interleave(len(q) // x.shape[2], 0)
                for x in (key, value)
            )  # fmt: skip
            hidden = q.new_ones(q.shape[1], length).triu(length - q.shape[1] + right).bool()
            scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
            out.append((scores.softmax(-1) @ v).transpose(0, 1))
            totals.append(scores.logsumexp(-1))
        return torch.cat(out), torch.cat(totals, 1)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    for cached in (flash._works, flash._parameters):
        cached.cache_clear()
    assert flash._works(DEVICE, torch.float32, 4, (PAGE, 2, DIM)) == right


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there is a device to compile for")
def test_kernels_compile_for_a_device_that_is_not_there() -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    paths = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, script, "90"], env=environment, check=True, timeout=240)
