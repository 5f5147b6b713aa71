"""EAGLE and EAGLE-2 drafts: decoder layers that read the target's final hidden state.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024), in the file
format that SGLang serves (``LlamaForCausalLMEagle``, ``Qwen2ForCausalLMEagle``). EAGLE-2 uses the
same network with another tree of proposals. The source is the output of the target's final norm.
The draft has no first norm, no final norm and no head: it is trained to predict that output, and
the target's head reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schema import UnsupportedModel
from ..checkpoint import weights_digest
from ..target.model import Target
from .decoder import DecoderDraft, KVAccess, Shapes, Sizes, check_hidden, fed_by, read_weights
from .interface import Source


class EagleDraft(DecoderDraft):
    """A :class:`~kvkeep.models.drafts.interface.Draft` of one stage with one layer or several."""

    def _run(self, stage: int, tokens: Tensor, source: Tensor, kv: KVAccess) -> Tensor:
        hidden = mixed = self._linear(torch.cat((self._embed(tokens), source), -1), "fc")
        for layer in range(self._layers):
            if layer:
                mixed = self._norm(hidden, f"layers.{layer}.input_layernorm")
            hidden = self._decode(layer, f"layers.{layer}.", hidden, mixed, kv)
        return hidden

    def propose(self, hidden: Tensor) -> Tensor:
        tokens: Tensor = self._target.head(hidden).argmax(-1)
        return tokens


def load(directory: Path, config: Mapping[str, Any], target: Target) -> EagleDraft:
    """See :func:`~kvkeep.models.drafts.loading.load_draft`."""
    sizes = Sizes.of(config, target.vocab_size)
    check_hidden(sizes, target)
    if "hot_vocab_size" in config:
        raise UnsupportedModel("a draft with hot_vocab_size is not supported")
    layers = config.get("num_hidden_layers", 1)
    biased = "qkv" if "Qwen2" in config["architectures"][0] else ""
    weights = read_weights(directory, _shapes(sizes, layers, biased, target.vocab_size))
    aux_layers, digest = (target.num_layers,), weights_digest(directory, config)
    stages = fed_by(Source.TARGET, 1)
    return EagleDraft(config, weights, target, aux_layers, stages, layers, digest)


def _shapes(sizes: Sizes, layers: int, biased: str, vocab: int) -> Shapes:
    """Shapes by name. A head in the file is a copy of the target's and stays unused."""
    hidden = sizes.hidden
    shapes: Shapes = {
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias?": (hidden,),
        "embed_tokens.weight?": (vocab, hidden),
        "lm_head.weight?": (vocab, hidden),
    }
    for layer in range(layers):
        shapes |= sizes.shapes(f"layers.{layer}.", hidden, biased)
        if layer:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (hidden,)
    return shapes
