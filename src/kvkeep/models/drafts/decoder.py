"""Llama-like decoder layers over page pools: the base of EAGLE and MTP drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from ...schema import Component, DraftMismatch, Group, UnsupportedModel
from ..attention.interface import AttentionPlan, Part, ReplayablePlan, Scoring
from ..graphs import Tensors
from ..passes import Pools, Run
from ..target import hf
from ..target.model import Target
from .interface import Source, Stage

Shapes = dict[str, tuple[int, ...]]
"""Shapes of a draft's tensors, by name. A name that ends in "?" is optional."""

_ROPE = (
    "head_dim", "hidden_size", "max_position_embeddings", "num_attention_heads", "rope_parameters",
    "rope_scaling", "rope_theta",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one decoder layer."""

    hidden: int
    inner: int  # of the MLP
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None  # positions that a row sees, its own included; None: all up to its own

    @classmethod
    def of(cls, config: Mapping[str, Any], vocab_size: int) -> Sizes:
        """Read and check the settings that every draft's ``config.json`` has.

        Raises:
            UnsupportedModel: a setting is unsupported or ambiguous.
            DraftMismatch: sizes are missing, contradict each other, or do not fit the target's
                vocabulary.
        """
        needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        if missing := set(needed) - set(config):
            raise DraftMismatch(f"the draft's config.json lacks {', '.join(sorted(missing))}")
        if (kind := config.get("hidden_act", "silu")) != "silu":
            raise UnsupportedModel(f"draft activation {kind!r}; supported is 'silu'")
        for name in ("quantization_config", "mlp_bias"):
            if config.get(name):
                raise UnsupportedModel(f"a draft with {name} is not supported")
        if config.get("partial_rotary_factor", 1) != 1:
            raise UnsupportedModel("a draft with partial_rotary_factor is not supported")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden // heads
        if heads % kv_heads or head_dim % 2:
            raise DraftMismatch(
                f"{heads} draft heads of {head_dim} do not fit {kv_heads} key heads and RoPE"
            )
        if config["vocab_size"] != vocab_size:
            raise DraftMismatch(
                f"the draft's vocabulary has {config['vocab_size']} tokens, "
                f"the target's {vocab_size}"
            )
        return cls(hidden, config["intermediate_size"], heads, kv_heads, head_dim, _window(config))

    @property
    def group_name(self) -> str:
        """Name of the group that keeps the layers' state."""
        return "draft" if self.window is None else "draft_window"

    def group(
        self, layers: int, stages: int, page_tokens: int, dtype: str, source: str = ""
    ) -> Group:
        """The group of ``layers`` such layers, with a row of carry for each of ``stages``."""
        row = (page_tokens, self.kv_heads, self.head_dim)
        components = (
            Component("k", tuple(range(layers)), row, dtype),
            Component("v", tuple(range(layers)), row, dtype),
            Component("carry", tuple(range(stages)), (self.hidden,), dtype),
        )
        tail = None  # a window needs at least the last page, which holds the carry
        if self.window is not None:
            tail = max(1, -(-(self.window - 1) // page_tokens))
        return Group(
            self.group_name, components, tail, sharded=False, required=False, source=source
        )

    def shapes(self, prefix: str, inputs: int, biased: str = "") -> Shapes:
        """Shapes of the tensors of a layer whose attention takes ``[rows, inputs]``.

        Args:
            prefix: of the tensors' names, with the final dot.
            biased: which of the "qkvo" projections have a bias.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = {
            "self_attn.q_proj": (queries, inputs),
            "self_attn.k_proj": (keys, inputs),
            "self_attn.v_proj": (keys, inputs),
            "self_attn.o_proj": (self.hidden, queries),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }
        shapes: Shapes = {f"{prefix}{name}.weight": shape for name, shape in linear.items()}
        shapes[f"{prefix}post_attention_layernorm.weight"] = (self.hidden,)
        names = [f"self_attn.{name}_proj" for name in biased]
        return shapes | {f"{prefix}{name}.bias": linear[name][:1] for name in names}


class KVAccess(NamedTuple):
    """How one pass reads and writes keys and values."""

    plan: AttentionPlan
    pools: Pools
    rope: tuple[Tensor, Tensor]  # cos and sin, [rows, 1, head_dim]


class DecoderDraft(ABC):
    """The common part of every :class:`~kvkeep.models.drafts.interface.Draft` of decoder layers.

    Args:
        weights: by name; converted to the target's dtype.
        aux_layers: target layers whose outputs the draft reads.
        layers: number of decoder layers in all stages.
        digest: hash of weights, configuration and aux layers, 32 hex digits.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        target: Target,
        aux_layers: tuple[int, ...],
        stages: tuple[Stage, ...],
        layers: int,
        digest: str,
    ) -> None:
        self.aux_layers, self.stages, self.digest = aux_layers, stages, digest
        self._weights = {
            name: w.to(target.device, target.dtype if w.is_floating_point() else None)
            for name, w in weights.items()
        }
        self._sizes = Sizes.of(config, target.vocab_size)
        self._layers = layers
        self._group = self._sizes.group_name
        self._target = target
        self._embedding = self._weights.get("embed_tokens.weight", target.embedding)
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        rope = hf.rope({name: config[name] for name in _ROPE if name in config})
        self._rope = rope.to(target.device)

    def groups(self, page_tokens: int) -> tuple[Group, ...]:
        """One group. It is neither sharded nor required: a hit without it is only slower."""
        dtype, stages = self._target.dtype_name, len(self.stages)
        return (self._sizes.group(self._layers, stages, page_tokens, dtype, self.digest),)

    def fuse(self, features: Tensor) -> Tensor:
        """Return the features unchanged."""
        return features

    def forward(
        self,
        stage: int,
        tokens: Tensor,
        source: Tensor | None,
        runs: Sequence[Run],
        pools: Mapping[str, Pools],
    ) -> Tensor:
        """See :meth:`~kvkeep.models.drafts.interface.Draft.forward`."""
        assert source is not None
        mine = pools[self._group]
        parts = [
            Part(run.tables.slots(self._group), run.start, run.rows, run.first) for run in runs
        ]
        page_tokens, window = mine["k"][0].shape[1], self._sizes.window
        plan = self._target.attention.plan(parts, page_tokens, window)
        graphs = self._target.graphs
        if graphs is None or any(r.rows > 1 for r in runs) or not isinstance(plan, ReplayablePlan):
            return self._run(stage, tokens, source, self._access(stage, plan, mine))

        def once(inputs: Tensors) -> Tensors:
            tokens, source, *rest = inputs
            kv = self._access(stage, plan.over(rest), mine)
            return (self._run(stage, tokens, source, kv),)

        (hidden,) = graphs.run((id(self), stage), once, (tokens, source, *plan.tensors))
        return hidden

    @abstractmethod
    def _run(self, stage: int, tokens: Tensor, source: Tensor, kv: KVAccess) -> Tensor:
        """:meth:`forward`, reading and writing keys and values through ``kv``."""

    def _access(self, stage: int, plan: AttentionPlan, pools: Pools) -> KVAccess:
        positions = plan.positions - self.stages[stage].shift
        cos, sin = self._rope(self._embedding, positions[None])
        return KVAccess(plan, pools, (cos[0, :, None], sin[0, :, None]))

    def _decode(
        self, layer: int, prefix: str, residual: Tensor, mixed: Tensor, kv: KVAccess
    ) -> Tensor:
        """One decoder layer: attention of ``mixed [rows, inputs]``, then the MLP, both residual."""
        query, key, value = (
            self._linear(mixed, f"{prefix}self_attn.{name}_proj").view(
                len(mixed), -1, self._sizes.head_dim
            )
            for name in "qkv"
        )
        query, key = (_rotate(x, *kv.rope) for x in (query, key))
        keys, values = kv.pools["k"][layer], kv.pools["v"][layer]
        kv.plan.write(keys, key)
        kv.plan.write(values, value)
        scoring = Scoring(self._sizes.head_dim**-0.5)
        seen = kv.plan.attend(query, keys, values, scoring).flatten(1)
        hidden = residual + self._linear(seen, f"{prefix}self_attn.o_proj")
        normed = self._norm(hidden, f"{prefix}post_attention_layernorm")
        gate = functional.silu(self._linear(normed, f"{prefix}mlp.gate_proj"))
        wide = gate * self._linear(normed, f"{prefix}mlp.up_proj")
        return hidden + self._linear(wide, f"{prefix}mlp.down_proj")

    def _embed(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self._embedding)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"], self._eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias")
        return functional.linear(x, weight, bias)


def fed_by(source: Source, stages: int) -> tuple[Stage, ...]:
    """``stages`` stages: the first reads the target's features, the others read ``source``."""
    return tuple(Stage(k + 1, source if k else Source.TARGET) for k in range(stages))


def read_weights(directory: Path, shapes: Shapes, prefix: str = "") -> dict[str, Tensor]:
    """Read the draft's tensors: those whose names start with ``prefix``, which is removed.

    Raises:
        DraftMismatch: tensors are missing, unexpected, or differ from ``shapes``.
    """
    weights: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            weights |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    wanted = {name.rstrip("?"): shape for name, shape in shapes.items()}
    missing = sorted(name for name in shapes if not name.endswith("?") and name not in weights)
    unexpected = sorted(set(weights) - set(wanted))
    if missing or unexpected:
        raise DraftMismatch(
            "the draft's tensors are not those of its architecture: "
            f"missing {missing}, unexpected {unexpected}"
        )
    for name, weight in weights.items():
        if weight.shape != wanted[name]:
            raise DraftMismatch(
                f"draft tensor {name} is {tuple(weight.shape)}, expected {wanted[name]} "
                "by the draft's config and the target"
            )
    return weights


def check_hidden(sizes: Sizes, target: Target) -> None:
    """Check that the draft has the target's hidden size: it uses the target's output and head.

    Raises:
        DraftMismatch: the sizes differ.
    """
    if sizes.hidden != target.hidden_size:
        raise DraftMismatch(
            f"the draft's hidden size is {sizes.hidden}, the target's {target.hidden_size}"
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window, by ``layer_types``, else ``use_sliding_window``, else its size alone."""
    window: int | None = config.get("sliding_window")
    kinds = sorted(set(config.get("layer_types") or ()))
    if kinds == ["full_attention"]:
        return None
    if kinds and kinds != ["sliding_attention"]:
        raise UnsupportedModel(f"a draft with layers of the types {kinds} is not supported")
    if not kinds and not config.get("use_sliding_window", window):
        return None
    if not kinds and "max_window_layers" in config:
        raise UnsupportedModel(
            "use_sliding_window with max_window_layers leaves open which draft layers have the "
            "window; say so in layer_types"
        )
    if not window or window < 1:
        raise DraftMismatch(f"a draft with sliding windows has sliding_window {window}")
    return window


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
