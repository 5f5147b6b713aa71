"""Recurrent layers' state: from slots into a model's cache object, and back once accepted.

A pass updates copies, so a slot keeps the state from before the pass. :meth:`Scratch.store` writes
the copies back when all rows of the pass were accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..passes import Pools, Run
from .survey import STATE, Inventory


@dataclass(frozen=True, slots=True)
class Scratch:
    """The states of some sequences after a pass, not yet stored."""

    slots: Tensor  # [sequences] int64, working slots of their running states
    tensors: tuple[tuple[Tensor, Tensor], ...]  # a pool, and its new states [sequences, *shape]

    def store(self, which: Sequence[int]) -> None:
        """Make the states of these sequences, by index in the pass, their running states."""
        chosen = torch.tensor(which, dtype=torch.int64, device=self.slots.device)
        slots = self.slots.index_select(0, chosen)
        for pool, tensor in self.tensors:
            pool.index_copy_(0, slots, tensor.index_select(0, chosen))


def load(
    cache: Any,
    inventory: Inventory,
    runs: Sequence[Run],
    pools: Mapping[str, Pools],
    device: torch.device,
) -> Scratch:
    """Put the running states of ``runs`` into the layers of transformers' cache object.

    Every sequence has a state: zeros at its beginning. So ``cache`` must be the object that
    :func:`~kvkeep.models.target.survey.states` has read; its layers then update states in place.
    """
    working = [int(run.tables.working(STATE)[0]) for run in runs]
    slots = torch.tensor(working, dtype=torch.int64, device=device)
    tensors = []
    for kept in inventory.states:
        _, pool = inventory.place(pools, kept.layer, kept.component)
        tensor = pool.index_select(0, slots)
        getattr(cache.layers[kept.layer], f"{kept.component}_states")[0] = tensor
        tensors.append((pool, tensor))
    return Scratch(slots, tuple(tensors))
