"""Recurrent layers' state: from slots into a model's cache object, and back once it is accepted.

The tensors that a pass updates are its own copies, so a slot keeps the state before the pass until
somebody says that the rows of the pass are part of the sequence.
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
    """The states of some sequences, after a pass."""

    slots: Tensor  # [sequences] int64, where their running states are kept
    tensors: tuple[tuple[Tensor, Tensor], ...]  # a pool, and [sequences, *shape] for it

    def store(self, which: Sequence[int]) -> None:
        """Make the states of these sequences, by their place in the pass, the running ones."""
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

    A state of zeros is a sequence's beginning, so there is no such thing as no state: ``cache`` is
    the one that :func:`~kvkeep.models.target.survey.states` looked at, and its layers update in
    place.
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
