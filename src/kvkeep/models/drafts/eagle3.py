"""EAGLE-3 drafts: one decoder layer that reads features of several target layers.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test" (2025), in the file format that SGLang serves (``LlamaForCausalLMEagle3``). The source is the
concatenated outputs of some target layers, projected by the draft's ``fc``.
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
from .decoder import DecoderDraft, KVAccess, Shapes, Sizes, fed_by, read_weights
from .interface import Source

_PREFIX = "midlayer."


class Eagle3Draft(DecoderDraft):
    """A :class:`~kvkeep.models.drafts.interface.Draft` of one stage."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        target: Target,
        aux_layers: tuple[int, ...],
        digest: str,
    ) -> None:
        stages = fed_by(Source.TARGET, 1)
        super().__init__(config, weights, target, aux_layers, stages, 1, digest)
        ids = torch.arange(len(weights["lm_head.weight"])) + weights.get("d2t", 0)
        self._ids = ids.to(target.device)  # draft id -> target id

    def fuse(self, features: Tensor) -> Tensor:
        return self._linear(features, "fc")

    def _run(self, stage: int, tokens: Tensor, source: Tensor, kv: KVAccess) -> Tensor:
        both = ((self._embed(tokens), "input_layernorm"), (source, "hidden_norm"))
        mixed = torch.cat([self._norm(x, _PREFIX + name) for x, name in both], -1)
        return self._decode(0, _PREFIX, source, mixed, kv)

    def propose(self, hidden: Tensor) -> Tensor:
        return self._ids[self._linear(self._norm(hidden, "norm"), "lm_head").argmax(-1)]


def load(directory: Path, config: Mapping[str, Any], target: Target) -> Eagle3Draft:
    """See :func:`~kvkeep.models.drafts.loading.load_draft`."""
    sizes = Sizes.of(config, target.vocab_size)
    _check_config(config)
    aux_layers = _aux_layers(config, target.num_layers)
    weights = read_weights(directory, _shapes(config, sizes, len(aux_layers), target))
    _check_vocabulary(weights, target.vocab_size)
    digest = weights_digest(directory, {**config, "aux_layers": aux_layers})
    return Eagle3Draft(config, weights, target, aux_layers, digest)


def _check_config(config: Mapping[str, Any]) -> None:
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        raise UnsupportedModel(f"an EAGLE-3 draft has 1 layer, not {layers}")
    eagle = config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModel("a draft with use_aux_hidden_state false is not EAGLE-3")
    for name in ("norm_before_residual", "norm_before_fc"):
        if config.get(name) or eagle.get(name):
            raise UnsupportedModel(f"a draft with {name} is not supported")


def _aux_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Target layers whose outputs the draft reads.

    The ids in a config name layer outputs. Without ids, the format's default is the *inputs* of
    layers 2, n // 2 and n - 3, which are the outputs of the layers before them.
    """
    eagle = config.get("eagle_config") or {}
    if "eagle_aux_hidden_state_layer_ids" in config:
        raise UnsupportedModel(
            "eagle_aux_hidden_state_layer_ids outside of eagle_config counts layers differently; "
            "move the ids of the layers whose outputs the draft reads into eagle_config"
        )
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    ids = (1, num_layers // 2 - 1, num_layers - 4) if ids is None else tuple(ids)
    if not ids or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= num_layers - 1:
        raise DraftMismatch(
            f"the draft reads the outputs of target layers {ids}; they must differ and be in "
            f"[0, {num_layers - 1}), below the last of the target's {num_layers} layers"
        )
    return ids


def _shapes(config: Mapping[str, Any], sizes: Sizes, features: int, target: Target) -> Shapes:
    hidden = sizes.hidden
    vocab = config.get("draft_vocab_size") or target.vocab_size
    biased = "qkvo" if config.get("attention_bias") else ""
    norms = ("norm", f"{_PREFIX}hidden_norm", f"{_PREFIX}input_layernorm")
    shapes = sizes.shapes(_PREFIX, 2 * hidden, biased)
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    shapes["fc.weight"] = (hidden, features * target.hidden_size)
    shapes["lm_head.weight"] = (vocab, hidden)
    own = "?" if hidden == target.hidden_size else ""  # else it cannot use the target's
    shapes[f"embed_tokens.weight{own}"] = (target.vocab_size, hidden)
    full = "?" if vocab == target.vocab_size else ""
    return shapes | {f"d2t{full}": (vocab,), "t2d?": (target.vocab_size,)}


def _check_vocabulary(weights: Mapping[str, Tensor], vocab_size: int) -> None:
    """Check ``d2t`` and ``t2d``: target id = draft id + d2t[draft id]; t2d marks these targets.

    Raises:
        DraftMismatch: an id is out of range, or the two disagree.
    """
    if "d2t" not in weights:
        return
    ids = torch.arange(len(weights["d2t"])) + weights["d2t"]
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise DraftMismatch(
            f"the draft's d2t leads to token ids {int(ids.min())} to {int(ids.max())}, "
            f"the target has [0, {vocab_size})"
        )
    marks = weights.get("t2d")
    if marks is not None and (len(set(ids.tolist())) != marks.sum() or not marks[ids].all()):
        raise DraftMismatch("the draft's d2t and t2d name different tokens")
