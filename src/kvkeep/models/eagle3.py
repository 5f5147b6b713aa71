"""The EAGLE-3 draft network: one decoder layer fed by the target's own features.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test" (2025), in the file format that SGLang serves (``LlamaForCausalLMEagle3``). The row of token
i mixes ``embed(token[i])`` with the fused target feature of token i - 1, at RoPE position i - 1;
in a draft chain the layer's own output takes the feature's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from ..schema import Component, DraftMismatch, Group, UnsupportedModel
from . import attention, hf
from .attention import Layout
from .base import DraftLayer, Pools, read_config, weights_digest

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ATTENTION, _MLP = "midlayer.self_attn.", "midlayer.mlp."


class Eagle3Draft:
    """A :class:`~kvkeep.models.base.Draft`. Weights are in the target's dtype."""

    layers = (DraftLayer(shift=1, source="fused"),)

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        aux_layers: tuple[int, ...],
        target: hf.Target,
        digest: str,
    ) -> None:
        self.aux_layers = aux_layers
        self.digest = digest  # of weights, configuration and aux layers, 32 hex digits
        self._weights = weights
        self._dtype_name = target.dtype_name
        self._embedding = weights.get("embed_tokens.weight", target.embedding)
        _, self._kv_heads, self._head_dim, self._hidden = _sizes(config)
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        self._rope = hf.rope(config).to(target.device)
        ids = torch.arange(len(weights["lm_head.weight"]), device=target.device)
        self._ids = ids + weights["d2t"] if "d2t" in weights else ids  # draft id -> target id

    def group(self, page_tokens: int) -> Group:
        """Not split over ranks, and a hit may do without it: drafts cost only speed."""
        row, dtype = (page_tokens, self._kv_heads, self._head_dim), self._dtype_name
        components = (
            Component("k", (0,), row, dtype),
            Component("v", (0,), row, dtype),
            Component("carry", (0,), (self._hidden,), dtype),
        )
        return Group("draft", components, sharded=False, required=False, source=self.digest)

    def fuse(self, features: Tensor) -> Tensor:
        return self._linear(features, "fc")

    def forward(self, tokens: Tensor, source: Tensor, layout: Layout, pools: Pools) -> Tensor:
        embedded = functional.embedding(tokens, self._embedding)
        both = ((embedded, "midlayer.input_layernorm"), (source, "midlayer.hidden_norm"))
        mixed = torch.cat([self._norm(x, name) for x, name in both], -1)
        query, key, value = (
            self._linear(mixed, f"{_ATTENTION}{name}_proj").view(len(mixed), -1, self._head_dim)
            for name in "qkv"
        )
        positions = layout.positions - self.layers[0].shift
        cos, sin = (one[0, :, None] for one in self._rope(mixed, positions[None]))
        query, key = (x * cos + _rotate_half(x) * sin for x in (query, key))
        keys, values = pools["k"][0], pools["v"][0]
        attention.write(keys, key, layout)
        attention.write(values, value, layout)
        seen = attention.attend(query, keys, values, layout, self._head_dim**-0.5)
        hidden = source + self._linear(seen.flatten(1), f"{_ATTENTION}o_proj")
        return hidden + self._mlp(self._norm(hidden, "midlayer.post_attention_layernorm"))

    def propose(self, hidden: Tensor) -> Tensor:
        return self._ids[self._linear(self._norm(hidden, "norm"), "lm_head").argmax(-1)]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        return functional.linear(x, weight, bias)

    def _mlp(self, x: Tensor) -> Tensor:
        gate = functional.silu(self._linear(x, f"{_MLP}gate_proj"))
        return self._linear(gate * self._linear(x, f"{_MLP}up_proj"), f"{_MLP}down_proj")


def load_draft(directory: Path, target: hf.Target) -> Eagle3Draft:
    """Load an EAGLE-3 draft from a local directory and check that it fits ``target``.

    Raises:
        ConfigError: not a model directory.
        UnsupportedModel: another kind of draft, or a setting that is not supported.
        DraftMismatch: weights that do not fit the draft's config or the target.
    """
    config = read_config(directory)
    _check_config(config, target)
    aux_layers = _aux_layers(config, target.num_layers)
    weights = _read_weights(directory, _shapes(config, len(aux_layers), target))
    _check_vocabulary(weights, target.vocab_size)
    digest = weights_digest(directory, {**config, "aux_layers": aux_layers})
    weights = {
        name: w.to(target.device, target.dtype if w.is_floating_point() else None)
        for name, w in weights.items()
    }
    return Eagle3Draft(config, weights, aux_layers, target, digest)


def _rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Heads, key heads, head dimension and hidden size."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    return heads, kv_heads, config.get("head_dim") or hidden // heads, hidden


def _aux_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Target layers whose outputs the draft reads.

    A config's ids mean layer outputs. Without ids the format's default is the *inputs* of layers
    2, n // 2 and n - 3, that is, the outputs of the layers before them.
    """
    eagle = config.get("eagle_config") or {}
    if "eagle_aux_hidden_state_layer_ids" in config:
        raise UnsupportedModel(
            "eagle_aux_hidden_state_layer_ids outside of eagle_config counts layers differently; "
            "move the ids of the layers whose outputs are meant into eagle_config"
        )
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    ids = (1, num_layers // 2 - 1, num_layers - 4) if ids is None else tuple(ids)
    if not ids or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= num_layers - 1:
        raise DraftMismatch(
            f"the draft reads the outputs of target layers {ids}; they must differ and be in "
            f"[0, {num_layers - 1}), below the last of the target's {num_layers} layers"
        )
    return ids


def _check_config(config: Mapping[str, Any], target: hf.Target) -> None:
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise UnsupportedModel(f"draft architecture {architectures}; supported is {ARCHITECTURE}")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := set(needed) - set(config):
        raise DraftMismatch(f"the draft's config.json lacks {', '.join(sorted(missing))}")
    if (layers := config.get("num_hidden_layers", 1)) != 1:
        raise UnsupportedModel(f"an EAGLE-3 draft has 1 layer, not {layers}")
    if (kind := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"draft activation {kind!r}; supported is 'silu'")
    eagle = config.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise UnsupportedModel("a draft with use_aux_hidden_state false is not EAGLE-3")
    for name in ("sliding_window", "norm_before_residual", "norm_before_fc"):
        if config.get(name) or eagle.get(name):
            raise UnsupportedModel(f"a draft with {name} is not supported")
    heads, kv_heads, head_dim, _ = _sizes(config)
    if heads % kv_heads or head_dim % 2:
        raise DraftMismatch(
            f"{heads} draft heads of {head_dim} do not fit {kv_heads} key heads and RoPE"
        )
    if config["vocab_size"] != target.vocab_size:
        raise DraftMismatch(
            f"the draft's vocabulary has {config['vocab_size']} tokens, "
            f"the target's {target.vocab_size}"
        )


def _shapes(
    config: Mapping[str, Any], features: int, target: hf.Target
) -> dict[str, tuple[int, ...]]:
    """Tensors that the config asks for; those that may be absent end in "?"."""
    heads, kv_heads, head_dim, hidden = _sizes(config)
    inner = config["intermediate_size"]
    vocab = config.get("draft_vocab_size") or target.vocab_size
    linear = {
        "fc": (hidden, features * target.hidden_size),
        f"{_ATTENTION}q_proj": (heads * head_dim, 2 * hidden),
        f"{_ATTENTION}k_proj": (kv_heads * head_dim, 2 * hidden),
        f"{_ATTENTION}v_proj": (kv_heads * head_dim, 2 * hidden),
        f"{_ATTENTION}o_proj": (hidden, heads * head_dim),
        f"{_MLP}gate_proj": (inner, hidden),
        f"{_MLP}up_proj": (inner, hidden),
        f"{_MLP}down_proj": (hidden, inner),
        "lm_head": (vocab, hidden),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": s for name, s in linear.items()}
    shapes |= {f"midlayer.{name}.weight": (hidden,) for name in norms}
    shapes["norm.weight"] = (hidden,)
    own = "?" if hidden == target.hidden_size else ""  # else the target's embedding does not fit
    shapes[f"embed_tokens.weight{own}"] = (target.vocab_size, hidden)
    if config.get("attention_bias"):
        projections = [f"{_ATTENTION}{name}_proj" for name in "qkvo"]
        shapes |= {f"{name}.bias": linear[name][:1] for name in projections}
    full = "?" if vocab == target.vocab_size else ""
    return shapes | {f"d2t{full}": (vocab,), "t2d?": (target.vocab_size,)}


def _read_weights(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted = {name.rstrip("?"): shape for name, shape in shapes.items()}
    missing = sorted(name for name in shapes if not name.endswith("?") and name not in weights)
    unexpected = sorted(set(weights) - set(wanted))
    if missing or unexpected:
        raise DraftMismatch(
            f"the draft's tensors are not EAGLE-3's: missing {missing}, unexpected {unexpected}"
        )
    for name, weight in weights.items():
        if weight.shape != wanted[name]:
            raise DraftMismatch(
                f"draft tensor {name} is {tuple(weight.shape)}, expected {wanted[name]} "
                "by the draft's config and the target"
            )
    return weights


def _check_vocabulary(weights: Mapping[str, Tensor], vocab_size: int) -> None:
    """``d2t`` holds differences: target id = draft id + d2t[draft id]; ``t2d`` marks the same."""
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
