"""What transformers' layers call in one pass instead of their own attention and cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class ForwardContext(Protocol):
    """What a model's layers meet in one pass: its attention function and its cache object.

    Heads lie before positions, as in transformers: ``[batch, heads, rows, dim]``.
    """

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """New rows as they are cached; returns what the layer goes on with."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """``[batch, rows, heads, value dim]``."""
