"""What a forward pass over page pools is given: the pools, each sequence's tables, its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..media.arrival import Arrival

Pools = Mapping[str, Sequence[Tensor]]
"""One group's device pools: component name -> one ``[slots, *shape]`` tensor per layer."""


class Tables(Protocol):
    """A sequence's block tables: the part of a lease that a forward pass reads."""

    @property
    def arriving(self) -> Sequence[Arrival]:
        """Loads in flight. A layer of the target waits for its own part of each load; every other
        reader waits for whole loads."""

    def slots(self, group: str) -> NDArray[np.int32]:
        """``[pages]`` slots of the pages in a group; -1: the page has no slot."""

    def working(self, group: str) -> NDArray[np.int32]:
        """``[Group.working]`` slots of the sequence's running state; no page uses them."""


class Run(NamedTuple):
    """One sequence's rows in a forward pass."""

    tables: Tables
    start: int  # position of the first row
    rows: int  # at least 1
    keep: int = 0  # the pass returns logits for this many last rows
    first: int = 0  # earlier positions are never read
