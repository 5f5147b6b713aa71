"""Copies between device and host against one contiguous copy of the same bytes.

Pages have keys and values of 32 layers and 8 heads of 128 in bf16, 64 tokens each, as Llama 3 8B
has them, and a second group with one such layer: 128 KiB per component, layer and page. Their
slots are scattered over both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ..media.base import Copy
from ..media.device import open_device
from ..media.memory import Memory
from ..schema import Component, Group, Identity, Schema
from .measure import Row, Samples, Step, Tell, one_thread

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
_PIECE = _SCHEMA.groups[0].components[0].layer_bytes
_OURS, _PEER = "kvkeep", "one contiguous copy_"


def measure(mib: int, repeats: int, progress: Tell) -> list[Row]:
    """Each layout, backend and direction; names say how many bytes lie in one piece: those of a
    component, layer and page.

    Both sides take turns, with one of PyTorch's threads. The kernel runs on CUDA only.

    Args:
        mib: at least so much is copied at once.
        repeats: turns of each side.
        progress: told what is measured next.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pages = -(-(mib << 20) // _PAGE)
    samples = Samples()
    with one_thread():
        one_piece = _contiguous(pages * _PAGE, device)
        for layout in ("page_first", "layer_first"):
            for backend in ("direct", "kernel") if device == "cuda" else ("direct",):
                progress(f"copies of {layout} pages, {backend}")
                memory = Memory(_SCHEMA, [2 * pages] * 2, [2 * pages] * 2, device, layout, backend)
                _fill(memory)
                copies = _scattered(pages)
                for name, copy in (("save", memory.save), ("load", memory.load)):
                    sides: dict[str, Step] = {_OURS: partial(copy, copies), _PEER: one_piece[name]}
                    for _ in range(repeats):
                        for side, step in sides.items():
                            samples.time(side, f"{name}, {layout}, {backend}", step)
    return samples.rows(f"{pages * _PAGE >> 20} MiB of {_PIECE >> 10} KiB:", _OURS, [_PEER])


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
