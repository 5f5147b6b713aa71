"""A draft that is a language model of its own: smaller, with the target's tokens.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); SGLang's
``STANDALONE``. Its rows need nothing of the target, so a hit needs no carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..schema import DraftMismatch, Group
from . import hf
from .attention import Layout, Part
from .base import Pools, Run, Source, Stage


class StandaloneDraft:
    """A :class:`~kvkeep.models.base.Draft`: a target under another group name."""

    aux_layers = ()
    stages = (Stage(0, Source.NOTHING),)

    def __init__(self, model: hf.Target) -> None:
        self._model = model
        model.capture((model.num_layers,))

    def groups(self, page_tokens: int) -> tuple[Group, ...]:
        """Not split over ranks, and a hit may do without it: drafts cost only speed."""
        group, source = self._model.group(page_tokens), self._model.digest
        return (replace(group, name="draft", sharded=False, required=False, source=source),)

    def fuse(self, features: Tensor) -> Tensor:
        """Never called: there is nothing to fuse."""
        return features

    def forward(
        self,
        stage: int,
        tokens: Tensor,
        source: Tensor | None,
        runs: Sequence[Run],
        pools: Mapping[str, Pools],
    ) -> Tensor:
        mine, device = pools["draft"], self._model.device
        parts = [Part(run.tables.slots("draft"), run.start, run.rows, run.first) for run in runs]
        layout = Layout.of(parts, mine["k"][0].shape[1], device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        _, hidden = self._model.forward(tokens, layout, none, mine)
        assert hidden is not None
        return hidden

    def propose(self, hidden: Tensor) -> Tensor:
        tokens: Tensor = self._model.head(hidden).argmax(-1)
        return tokens


def load(directory: Path, target: hf.Target) -> StandaloneDraft:
    """See :func:`~kvkeep.models.drafts.load_draft`. It runs where and in what the target does."""
    dtype = str(target.dtype).removeprefix("torch.")
    model = hf.load_target(directory, dtype, str(target.device))
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
    return StandaloneDraft(model)
