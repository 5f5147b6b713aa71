"""Attention over page pools: the interface that layers use on every device.

A pool is ``[slots, page_tokens, *row]``; for keys and values, ``row`` is ``(kv_heads, head_dim)``.
A sequence's block table maps its pages to slots. A pool may have another dtype than the rows:
writing rounds them, reading widens them.

A step packs the rows of many sequences one after another. An :class:`AttentionPlan` says where
these rows go and what they attend to. A step makes one plan for each group of layers, and every
layer of the group uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's rows in a packed batch, and the positions that they attend to.

    ::

        first                 start               start + rows
          |  seen by all rows   |  seen causally       |
          (with a sliding window, a row sees the last ``window`` positions, its own included)
    """

    table: NDArray[np.int32]  # page -> slot; covers start + rows
    start: int  # position of the first row
    rows: int
    first: int = 0  # earlier positions are never read; pages that end before may lack slots


class Scoring(NamedTuple):
    """How products of queries and keys become scores, before the softmax."""

    scale: float  # multiplies each product
    softcap: float | None = None  # score ``s`` becomes ``softcap * tanh(s / softcap)`` (Gemma 2)
    sinks: Tensor | None = None  # [heads], an extra score per head that has no value (gpt-oss)


class AttentionPlan(Protocol):
    """Where the rows of a packed batch go in pools of one geometry, and what they attend to."""

    @property
    def positions(self) -> Tensor:
        """``[rows]`` int64: each row's position in its sequence."""

    def write(self, pool: Tensor, rows: Tensor) -> None:
        """Store ``rows [rows, *row]`` in ``pool``; values beyond its dtype's range saturate."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Attention of each row over the positions it sees, its own included.

        Args:
            query: ``[rows, heads, head_dim]``; ``heads`` is a multiple of the pools' kv_heads.
            keys, values: pools that already hold the keys and values of these rows.

        Returns:
            ``[rows, heads, value dim]``.
        """

    def gather(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        """``[seen, *row]`` in ``dtype``: all that any row sees, in an order the plan chooses."""

    def attend_to(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """:meth:`attend` over keys and values ``[seen, their heads, dim]`` that the caller
        computed from what :meth:`gather` returned."""


@runtime_checkable
class ReplayablePlan(AttentionPlan, Protocol):
    """A plan that a CUDA graph can replay: between steps of the same shapes, only tensors change.

    This holds only while all sequences have the same number of rows.
    """

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """``[sequences, ...]`` each; the first is positions, ``[sequences, rows]``."""

    def over(self, tensors: Sequence[Tensor]) -> Self:
        """This plan with ``tensors`` in place of its own."""


class Attention(Protocol):
    """Attention on one device. The engine's thread only."""

    def plan(
        self, parts: Sequence[Part], page_tokens: int, window: int | None = None
    ) -> AttentionPlan:
        """Plan a packed batch of ``parts``, in their order.

        Args:
            parts: at least one; no two of the same sequence.
            window: number of positions that a row sees, its own included; None: all up to its own.
        """
