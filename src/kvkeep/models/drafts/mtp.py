"""Multi-token prediction (MTP) drafts: extra layers that were trained with the target.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), with dense layers, in the file format of
Xiaomi's MiMo-7B (2025; ``model.mtp_layers.k.*``, served by SGLang and vLLM as ``MiMoMTP``). Each
layer norms its source and its token's embedding, projects both together, and has a Qwen 2 decoder
layer and a final norm. Embedding and head are the target's. The first layer's source is the output
of the target's final norm.

MiMo-7B has one layer. Published models with several differ in the source of the others (SGLang pull
request 18564): the previous layer in DeepSeek's report and Step 3.5, the target again in MiMo-V2.
``chain_hidden_states`` in the config chooses (true: the previous layer). No published file holds
several dense layers, so this key is our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...schema import DraftMismatch, UnsupportedModel
from ..checkpoint import weights_digest
from ..target.model import Target
from .decoder import DecoderDraft, KVAccess, Shapes, Sizes, check_hidden, fed_by, read_weights
from .interface import Source

_PREFIX = "model.mtp_layers."
_NORMS = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")


class MtpDraft(DecoderDraft):
    """A :class:`~kvkeep.models.drafts.interface.Draft` with a stage for each layer."""

    def _run(self, stage: int, tokens: Tensor, source: Tensor, kv: KVAccess) -> Tensor:
        at = f"{stage}."
        both = ((source, "hidden_layernorm"), (self._embed(tokens), "token_layernorm"))
        mixed = torch.cat([self._norm(x, at + name) for x, name in both], -1)
        hidden = self._linear(mixed, f"{at}input_proj")
        mixed = self._norm(hidden, f"{at}input_layernorm")
        hidden = self._decode(stage, at, hidden, mixed, kv)
        return self._norm(hidden, f"{at}final_layernorm")

    def propose(self, hidden: Tensor) -> Tensor:
        tokens: Tensor = self._target.head(hidden).argmax(-1)
        return tokens


def load(directory: Path, config: Mapping[str, Any], target: Target) -> MtpDraft:
    """See :func:`~kvkeep.models.drafts.loading.load_draft`.

    The directory may hold the whole target; only the MTP layers are read.
    """
    sizes = Sizes.of(config, target.vocab_size)
    check_hidden(sizes, target)
    count = config.get("num_nextn_predict_layers") or 0
    if count < 1:
        raise DraftMismatch(f"the draft's config has num_nextn_predict_layers {count}")
    chained = config.get("chain_hidden_states")
    if count > 1 and not isinstance(chained, bool):
        raise UnsupportedModel(
            f"the config leaves open what feeds the {count} prediction layers; set "
            "chain_hidden_states to true (the layer before) or false (the target)"
        )
    weights = read_weights(directory, _shapes(sizes, count), _PREFIX)
    stages = fed_by(Source.PREVIOUS if chained else Source.TARGET, count)
    aux_layers, digest = (target.num_layers,), weights_digest(directory, config)
    return MtpDraft(config, weights, target, aux_layers, stages, count, digest)


def _shapes(sizes: Sizes, count: int) -> Shapes:
    shapes: Shapes = {}
    for k in range(count):
        shapes |= sizes.shapes(f"{k}.", sizes.hidden, "qkv")
        shapes |= {f"{k}.{name}.weight": (sizes.hidden,) for name in _NORMS}
        shapes[f"{k}.input_proj.weight"] = (sizes.hidden, 2 * sizes.hidden)
    return shapes
