"""Tiny random models and drafts on disk, page pools and leases for tests of models and runner."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from kvkeep.engine.messages import Generate, Sampling
from kvkeep.engine.request import Sequence
from kvkeep.schema import Group

VOCAB, HIDDEN, PAGE = 128, 64, 16
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None, "head_dim": 16},
    "Qwen3Moe": {
        "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip


def save_target(directory: Path, family: str, **overrides: Any) -> Path:
    """A random model whose weights are large enough that its output varies."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **overrides})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.15)
    model.save_pretrained(directory)
    return directory


def draft_config(**overrides: Any) -> dict[str, Any]:
    return {
        **SHAPE,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "draft_vocab_size": 96,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        **overrides,
    }


def draft_tensors() -> dict[str, Tensor]:
    """Weights for :func:`draft_config`."""
    torch.manual_seed(1)
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (64, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (32, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (32, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, 64),
        "midlayer.mlp.gate_proj": (128, HIDDEN),
        "midlayer.mlp.up_proj": (128, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 128),
        "midlayer.hidden_norm": (HIDDEN,),
        "midlayer.input_layernorm": (HIDDEN,),
        "midlayer.post_attention_layernorm": (HIDDEN,),
        "norm": (HIDDEN,),
        "lm_head": (96, HIDDEN),
    }
    tensors = {
        f"{name}.weight": torch.randn(shape) * 0.15 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    ids = torch.randperm(VOCAB)[:96].sort().values
    tensors["d2t"] = ids - torch.arange(96)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def save_draft(directory: Path, tensors: dict[str, Tensor] | None = None, **overrides: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(draft_config(**overrides)))
    save_file(draft_tensors() if tensors is None else tensors, directory / "model.safetensors")
    return directory


def allocate(group: Group, slots: int, fill: float = torch.nan) -> dict[str, list[Tensor]]:
    """Pools of ``group``, filled with what must never be read."""
    return {
        c.name: [torch.full((slots, *c.shape), fill) for _ in c.layers] for c in group.components
    }


@dataclass
class FakeLease:
    """The two methods of a lease that the runner calls."""

    tables: dict[str, NDArray[np.int32]]

    def slots(self, group: str) -> NDArray[np.int32]:
        return self.tables[group]

    def valid_from(self, group: str) -> int:
        return 0


def sequence(tokens: list[int], lease: FakeLease, **options: Any) -> Sequence:
    """A request for ``tokens``; options of :class:`Sampling` or :class:`Generate`."""
    names = ("temperature", "top_p", "top_k", "max_tokens")
    sampling = Sampling(**{"temperature": 0.0} | {k: options.pop(k) for k in names if k in options})
    seed = options.pop("seed", 0)
    made = Sequence.of(Generate(id="r", tokens=tokens, sampling=sampling, **options), seed)
    made.lease = lease  # type: ignore[assignment]
    return made
