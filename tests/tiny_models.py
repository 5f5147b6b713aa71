"""Tiny random models and drafts on disk, page pools and leases for tests of models and runner."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from kvkeep.media.arrival import Arrival
from kvkeep.media.memory import TORCH_DTYPES
from kvkeep.schema import Group

if TYPE_CHECKING:
    from kvkeep.engine.request import RequestState

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
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {
    "head_dim": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA = {**MIXED, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}  # fmt: skip
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 16, **MOE}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 12}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", GEMMA),
    "gpt-oss": ("GptOss", {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2": ("DeepseekV2", MLA),
    "deepseek-v3": ("DeepseekV3", MLA),
    "qwen3-next": ("Qwen3Next", {**DELTA, **MOE, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"] * 2}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "falcon-h1": ("FalconH1", {**MAMBA, "mamba_d_ssm": 128, "head_dim": 16}),
    "granitemoehybrid": ("GraniteMoeHybrid", {**MAMBA, "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0, "shared_intermediate_size": 64}),
}  # fmt: skip
"""One of each kind of state and each way transformers writes it: class prefix, and its config."""


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
        for name, weight in model.named_parameters():
            if "sinks" in name:
                weight.normal_()
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
        c.name: [torch.full((slots, *c.shape), fill).to(TORCH_DTYPES[c.dtype]) for _ in c.layers]
        for c in group.components
    }


@dataclass
class FakeLease:
    """What the runner reads of a lease."""

    tables: dict[str, NDArray[np.int32]]
    workers: dict[str, NDArray[np.int32]] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    arriving: list[Arrival] = field(default_factory=list)

    def slots(self, group: str) -> NDArray[np.int32]:
        return self.tables[group]

    def working(self, group: str) -> NDArray[np.int32]:
        return self.workers[group]

    def valid_from(self, group: str) -> int:
        return 0


def sequence(tokens: list[int], lease: FakeLease, **options: Any) -> RequestState:
    """A request for ``tokens``; options of :class:`Sampling` or :class:`Generate`."""
    from kvkeep.engine.messages import Generate, Sampling  # here: not all tests need an engine
    from kvkeep.engine.request import RequestState

    names = ("temperature", "top_p", "top_k", "max_tokens")
    sampling = Sampling(**{"temperature": 0.0} | {k: options.pop(k) for k in names if k in options})
    seed = options.pop("seed", 0)
    made = RequestState.of(Generate(id="r", tokens=tokens, sampling=sampling, **options), seed)
    made.lease = lease  # type: ignore[assignment]
    return made
