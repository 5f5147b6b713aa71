"""Standalone drafts: smaller language models with the target's vocabulary.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); SGLang's
``STANDALONE``. Their rows read nothing of the target, so they need no carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...media.arrival import Arrival
from ...schema import DraftMismatch, Group, UnsupportedModel
from ..passes import Pools, Run, Tables
from ..target import hf
from ..target.model import Target
from .interface import Source, Stage


@dataclass(frozen=True, slots=True)
class _Own:
    """A lease's tables under the group names of the draft model itself."""

    tables: Tables

    @property
    def arriving(self) -> Sequence[Arrival]:
        return ()  # layer numbers differ, and drafts run only after loads are complete

    def slots(self, group: str) -> NDArray[np.int32]:
        return self.tables.slots(_name(group))

    def working(self, group: str) -> NDArray[np.int32]:
        return self.tables.working(_name(group))


class StandaloneDraft:
    """A :class:`~kvkeep.models.drafts.interface.Draft` that runs a second target model.

    Its groups have names of their own beside the target's.
    """

    aux_layers = ()
    stages = (Stage(0, Source.NOTHING),)

    def __init__(self, model: Target) -> None:
        self._model = model
        model.capture((model.num_layers,))

    def groups(self, page_tokens: int) -> tuple[Group, ...]:
        """Groups of the model, neither sharded nor required: a hit without them is only slower."""
        return tuple(
            replace(
                group, name=_name(group.name), sharded=False, required=False,
                source=self._model.digest,
            )
            for group in self._model.groups(page_tokens)
        )  # fmt: skip

    def fuse(self, features: Tensor) -> Tensor:
        """Never called, because the source is ``NOTHING``."""
        return features

    def forward(
        self,
        stage: int,
        tokens: Tensor,
        source: Tensor | None,
        runs: Sequence[Run],
        pools: Mapping[str, Pools],
    ) -> Tensor:
        mine = [run._replace(tables=_Own(run.tables)) for run in runs]
        names = [group.name for group in self._model.groups(1)]
        _, hidden = self._model.forward(tokens, mine, {name: pools[_name(name)] for name in names})
        assert hidden is not None
        return hidden

    def propose(self, hidden: Tensor) -> Tensor:
        tokens: Tensor = self._model.head(hidden).argmax(-1)
        return tokens


def load(directory: Path, target: Target) -> StandaloneDraft:
    """See :func:`~kvkeep.models.drafts.loading.load_draft`.

    It runs on the target's device, in the target's dtype.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    model = hf.load_target(directory, dtype, str(target.device))
    model.graphs = target.graphs
    if model.vocab_size != target.vocab_size:
        raise DraftMismatch(
            f"the draft's vocabulary has {model.vocab_size} tokens, the target's "
            f"{target.vocab_size}"
        )
    if model.context_length < target.context_length:
        raise DraftMismatch(
            f"the draft was made for {model.context_length} tokens, the target for "
            f"{target.context_length}"
        )
    if not model.packable:
        raise UnsupportedModel(
            f"{directory} has recurrent layers; a draft cannot roll their state back on rejection"
        )
    return StandaloneDraft(model)


def _name(group: str) -> str:
    return "draft" if group == "full" else f"draft_{group}"
