"""Attention over page pools: what layers ask for, whatever device computes it.

A pool is ``[slots, page_tokens, *row]``, for keys and values ``row`` is ``(kv_heads, head_dim)``; a
sequence's *table* maps its pages to slots. A pool may have another dtype than the rows: they are
rounded when written and widened when read.

A step packs rows of many sequences one after another. Where they go and what they see is worked out
once per step and group of layers, as a :class:`AttentionPlan`; every layer of the group uses it.
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
    """One sequence's rows in a packed batch, and what they may see.

    ::

        first                 start               start + rows
          |  seen by all rows   |  seen causally       |
          (of a window, row i sees its last ``window`` positions, itself included)
    """

    table: NDArray[np.int32]  # page -> slot; covers start + rows
    start: int  # position of the first row
    rows: int
    first: int = 0  # positions before are never read, their whole pages may have no slot


class Scoring(NamedTuple):
    """What becomes of the products of queries and keys before the softmax."""

    scale: float  # a factor
    softcap: float | None = None  # scores ``s`` become ``softcap * tanh(s / softcap)`` (Gemma 2)
    sinks: Tensor | None = None  # [heads], one more score of each head, for nothing (gpt-oss)


class AttentionPlan(Protocol):
    """Where the rows of a packed batch go in pools of one geometry, and what they see there."""

    @property
    def positions(self) -> Tensor:
        """``[rows]`` int64, of each row in its sequence."""

    def write(self, pool: Tensor, rows: Tensor) -> None:
        """Store ``rows [rows, *row]`` in ``pool``; what is too large for it saturates."""

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """Attention of each row over what it sees of its sequence, the row itself included.

        Args:
            query: ``[rows, heads, head_dim]``; ``heads`` is a multiple of the pools' kv_heads.
            keys, values: pools that already hold the rows' own keys and values.

        Returns:
            ``[rows, heads, value dim]``.
        """

    def gather(self, pool: Tensor, dtype: torch.dtype) -> Tensor:
        """``[seen, *row]`` in ``dtype``: what any row sees, in an order of the plan's own."""

    def attend_to(self, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
        """:meth:`attend` over keys and values ``[seen, heads of them, dim]`` that were made of
        what :meth:`gather` returned."""


@runtime_checkable
class ReplayablePlan(AttentionPlan, Protocol):
    """A plan made of nothing but tensors and what stays the same from step to step, if sequences
    have equally many rows: other tensors of these shapes are the plan of another step."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """``[sequences, ...]`` each; positions ``[sequences, rows]`` are the first."""

    def over(self, tensors: Sequence[Tensor]) -> Self:
        """The plan that has these in place of its own."""


class Attention(Protocol):
    """Attention on one device. The engine's thread only."""

    def plan(
        self, parts: Sequence[Part], page_tokens: int, window: int | None = None
    ) -> AttentionPlan:
        """Lay out ``parts``, at least one and each of another sequence, one after another.

        Args:
            window: positions that a row sees, its own included; None: all up to its own.
        """
