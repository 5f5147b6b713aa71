"""Paged attention on CUDA devices, by kernels that follow block tables.

Our own kernel handles everything: windows, soft-capping, sinks, pools of another dtype, and rows
that do not see a sequence's first positions. Plain attention with several rows per sequence goes to
PyTorch's flash attention, where that reads block tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from . import flash, kernels
from .blocks import Blocks, block_tables
from .cascade import CascadePlan, write_rows
from .interface import Part, Scoring
from .layout import lay_out

_PROGRAMS = 8  # for a CPU with Triton's interpreter, which does not report processors


class PagedAttention:
    """An :class:`~kvkeep.models.attention.interface.Attention`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._programs = device, _PROGRAMS
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._programs = 2 * properties.multi_processor_count

    def plan(self, parts: Sequence[Part], page_tokens: int, window: int | None = None) -> PagedPlan:
        blocks = block_tables(parts, page_tokens, window, self._device)
        return PagedPlan(blocks, self._programs, tuple(parts))


@dataclass(frozen=True)
class PagedPlan:
    """A :class:`~kvkeep.models.attention.interface.ReplayablePlan`."""

    blocks: Blocks
    programs: int
    parts: tuple[Part, ...] = ()

    @property
    def positions(self) -> Tensor:
        return self.blocks.positions

    def write(self, pool: Tensor, rows: Tensor) -> None:
        write_rows(pool, self.blocks.index, rows)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        if flash.takes(query, keys, values, self.blocks, scoring):
            return flash.attend(query, keys, values, self.blocks, scoring)
        return kernels.attend(query, keys, values, self.blocks, scoring, self.programs)

    def gather(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        return self._gathering.gather(pool, dtype)

    def attend_to(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        return self._gathering.attend_to(query, keys, values, scoring)

    @cached_property
    def _gathering(self) -> CascadePlan:
        b = self.blocks
        return CascadePlan(lay_out(self.parts, b.page_tokens, b.window, b.tables.device))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        b = self.blocks
        positions, index = (x.view(len(b.tables), -1) for x in (b.positions, b.index))
        return positions, index, b.tables, b.firsts

    def over(self, tensors: Sequence[Tensor]) -> PagedPlan:
        positions, index, tables, firsts = tensors
        b = self.blocks
        blocks = Blocks.even(positions, index, tables, firsts, b.page_tokens, b.window)
        return PagedPlan(blocks, self.programs)
