"""Copies between device and host against one contiguous copy of the same bytes.

Pages have keys and values of 32 layers and 8 heads of 128 in bf16, 64 tokens each, as Llama 3 8B
has them, and a second group with one such layer: 128 KiB per component, layer and page. Their
slots are scattered over both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from ..media.base import Copy
from ..media.device import open_device
from ..media.memory import Memory
from ..schema import Component, Group, Identity, Schema

_ROW = (64, 8, 128)
_SCHEMA = Schema(
    Identity("bench"),
    page_tokens=64,
    groups=tuple(
        Group(name, tuple(Component(kind, tuple(range(layers)), _ROW, "BF16") for kind in "kv"))
        for name, layers in (("full", 32), ("second", 1))
    ),
)
_PAGE = sum(group.page_bytes for group in _SCHEMA.groups)


def measure(mib: int, repeats: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows ``{"name", "ours", "unit", "peer", "peer_value", "ratio"}``: medians, ours / peer.

    Both sides take turns, with one of PyTorch's threads. The kernel runs on CUDA only.

    Args:
        mib: at least so much is copied at once.
        repeats: turns of each side.
        progress: told what is measured next.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pages = -(-(mib << 20) // _PAGE)
    rows = []
    with _one_thread():
        one_piece = _contiguous(pages * _PAGE, device)
        for layout in ("page_first", "layer_first"):
            for backend in ("direct", "kernel") if device == "cuda" else ("direct",):
                progress(f"copies of {layout} pages, {backend}")
                memory = Memory(_SCHEMA, [2 * pages] * 2, [2 * pages] * 2, device, layout, backend)
                _fill(memory)
                for name, copy in (("save", memory.save), ("load", memory.load)):
                    both = partial(copy, _scattered(pages)), one_piece[name]
                    ours, theirs = _turns(repeats, both)
                    rows.append(
                        {
                            "name": f"{name} {pages * _PAGE >> 20} MiB, {layout}, {backend}",
                            "ours": ours,
                            "unit": "ms",
                            "peer": "one contiguous copy_",
                            "peer_value": theirs,
                            "ratio": ours / theirs,
                        }
                    )
    return rows


def _contiguous(size: int, device: str) -> dict[str, Callable[[], object]]:
    """Copies of ``size`` bytes in one piece, by direction; done when they return."""
    place = open_device(device)
    pool, arena = place.zeros((size,)).fill_(1), place.host_zeros((size,)).fill_(1)
    return {"save": partial(arena.copy_, pool), "load": partial(pool.copy_, arena)}


def _fill(memory: Memory) -> None:
    """Memory that was never written is all one page, and fast to read."""
    pools = (p for group in memory.pools.values() for layers in group.values() for p in layers)
    for block in (*memory.arenas, *pools):
        block.fill_(1)


def _scattered(pages: int) -> list[Copy]:
    """The same pages of both groups, in random slots out of twice as many."""
    dice = np.random.default_rng(0)
    source, target = (dice.permutation(2 * pages)[:pages].astype(np.int32) for _ in range(2))
    return [Copy(g, source, target) for g in range(len(_SCHEMA.groups))]


def _turns(repeats: int, sides: tuple[Callable[[], object], ...]) -> list[float]:
    """Median milliseconds of each side."""
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for times, side in zip(taken, sides, strict=True):
            start = time.perf_counter()
            side()
            times.append(1e3 * (time.perf_counter() - start))
    return [median(times) for times in taken]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
