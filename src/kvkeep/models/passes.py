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
    """Where a sequence's state lies: the part of a lease that a forward pass reads."""

    @property
    def arriving(self) -> Sequence[Arrival]:
        """What of it is still being loaded: a target's layer waits for its part of each, whoever
        else reads for all."""

    def slots(self, group: str) -> NDArray[np.int32]:
        """``[pages]`` slots of a group; -1: the page has none."""

    def working(self, group: str) -> NDArray[np.int32]:
        """``[Group.working]`` slots of the running state, which pages do not share."""


class Run(NamedTuple):
    """One sequence's rows in a pass."""

    tables: Tables
    start: int  # position of the first row
    rows: int  # at least 1
    keep: int = 0  # last rows whose logits are wanted
    first: int = 0  # positions before are never read
