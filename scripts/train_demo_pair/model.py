"""The two networks: an unmodified Hugging Face Llama, and an EAGLE-3 draft of one layer.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840) drafts from features of three of the target's layers.
Module names equal those of published EAGLE-3 checkpoints, so `state_dict` needs no renaming.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from .data import VOCAB_SIZE

FEATURE_LAYERS = (0, 1, 2)  # the draft sees the outputs of these decoder layers
ROPE_THETA = 1e7


def llama_config(layers: int) -> LlamaConfig:
    """Return the config of a target (4 layers) or a draft (1 layer)."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )


def new_target() -> LlamaForCausalLM:
    """Return an untrained target of 1.5M parameters."""
    return LlamaForCausalLM(llama_config(layers=4))


def features(hidden_states: Sequence[Tensor]) -> Tensor:
    """Concatenate the outputs of FEATURE_LAYERS: `[..., 3 * hidden]`.

    `hidden_states` is what the target returns with `output_hidden_states=True`: the embeddings
    first, then each layer's output.
    """
    return torch.cat([hidden_states[layer + 1] for layer in FEATURE_LAYERS], dim=-1)


class _Attention(nn.Module):
    """Projections only; callers compute attention, which differs in training and serving."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, head_dim = config.hidden_size, config.head_dim
        query_width = config.num_attention_heads * head_dim
        key_width = config.num_key_value_heads * head_dim
        self.q_proj = nn.Linear(2 * width, query_width, bias=False)
        self.k_proj = nn.Linear(2 * width, key_width, bias=False)
        self.v_proj = nn.Linear(2 * width, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, width, bias=False)


class _MidLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)


class Draft(nn.Module):
    """One decoder layer over pairs of (embedding of a token, feature of the token before it).

    A draft step takes `fc` of the target's features, or the hidden state of the previous draft
    step. It then runs `project`, the caller's attention, `finish` and `logits`. Tensors are
    `[batch, rows, ...]`, or `[batch, heads, rows, ...]` where there are heads.
    """

    def __init__(self, config: LlamaConfig) -> None:
        """Make an untrained draft. It has no embeddings; it uses the target's."""
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(FEATURE_LAYERS) * width, width, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self._rotary = LlamaRotaryEmbedding(config)

    def project(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys after RoPE, and values: `[batch, heads, rows, head_dim]`.

        `positions` is int64 `[1, rows]`.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        pair = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)
        split = (-1, self.config.head_dim)
        query = attention.q_proj(pair).unflatten(-1, split).transpose(1, 2)
        key = attention.k_proj(pair).unflatten(-1, split).transpose(1, 2)
        value = attention.v_proj(pair).unflatten(-1, split).transpose(1, 2)
        cos, sin = self._rotary(pair, positions)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        return query, key, value

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's output, which is also the next draft step's hidden state.

        `attended` is `[batch, heads, rows, head_dim]`. The residual is `hidden` before its norm.
        """
        layer = self.midlayer
        hidden = hidden + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(-2))
        return cast(Tensor, hidden + layer.mlp(layer.post_attention_layernorm(hidden)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return scores over the vocabulary, `[batch, rows, vocab]`."""
        return cast(Tensor, self.lm_head(self.norm(hidden)))


def new_draft() -> Draft:
    """Return an untrained draft of 0.6M parameters."""
    return Draft(llama_config(layers=1))
