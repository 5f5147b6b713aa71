"""What transformers' layers call in one pass instead of their own attention and cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class ForwardContext(Protocol):
    """What layers call in one pass, through our attention function and our cache object.

    Heads precede positions, as in transformers: ``[batch, heads, rows, dim]``.
    """

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take the new rows that a layer gives its cache; return what it shall continue with."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """Attention of one layer, ``[batch, rows, heads, value dim]``.

        Args:
            options: the keyword arguments of transformers' attention function.
        """
