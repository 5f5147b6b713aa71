"""Initial weights that already contain an induction circuit.

Training from random weights learns in-context copying only after far more steps than a demo can
afford. Two heads suffice for copying (Olsson et al. 2022, "In-context Learning and Induction
Heads"). The first writes the previous token's code beside each token's own. The second attends to
the position whose previous token equals the current token, and copies that position's token. This
module writes the two heads into the target's first two layers, and the second one into the draft.
Training refines them.

The hidden state is divided into named ranges of channels:

    0         a constant, the same for every token: input of the purely positional head
    1..63     the token's own code, a vector of fixed norm
    64..126   scratch: first the previous token's code, then the predicted token's code
"""

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from .model import ROPE_THETA, Draft

_CONSTANT = 0
_CODE = slice(1, 64)
_SCRATCH = slice(64, 127)
_CODE_WIDTH = 63

_CONSTANT_VALUE = 2.0
_CODE_STD = 0.25  # per channel
_UNUSED_STD = 0.0125  # scratch channels of an embedding
_DAMPING = 0.02  # of a structured head's random weights
_POSITION_GAIN = 1.3
_POSITION_FREQUENCIES = 12  # of RoPE; the fastest ones distinguish neighbouring positions
_MATCH_GAIN = 1.6
_MATCH_SLOWEST_TURN = 1.3e-4  # radians per token: 0.3 over the longest training row
_PREVIOUS_GAIN = 0.7
_COPY_GAIN = 1.0
_READ_GAIN = 0.5


class Projections(Protocol):
    """The projections of an attention layer of the target or the draft."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear


def structure_target(target: LlamaForCausalLM) -> None:
    """Overwrite a new target's weights with the two heads, and small random values elsewhere."""
    config = target.config
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        embeddings = target.model.embed_tokens.weight
        nn.init.normal_(embeddings, std=_UNUSED_STD)
        embeddings[:, _CONSTANT] = _CONSTANT_VALUE
        codes = torch.randn(config.vocab_size, _CODE_WIDTH)
        codes = nn.functional.normalize(codes, dim=-1) * _CODE_STD * math.sqrt(_CODE_WIDTH)
        embeddings[:, _CODE] = codes
        _write_previous_token_head(target.model.layers[0].self_attn, config)
        _write_induction_head(target.model.layers[1].self_attn, config, keys_from=_SCRATCH)
        nn.init.normal_(target.lm_head.weight, std=0.01)
        target.lm_head.weight[:, _SCRATCH] = codes * _READ_GAIN


def structure_draft(draft: Draft, target: LlamaForCausalLM) -> None:
    """Overwrite a new draft's weights with an induction head and the target's output head.

    A draft row is a pair (next token's embedding, this token's feature), so it needs no
    previous-token head: `fc` passes this token's code on from the first layer's output.
    """
    config = draft.config
    width = config.hidden_size
    identity_width = _CODE.stop
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        draft.lm_head.weight.copy_(target.lm_head.weight)
        draft.fc.weight *= 0.3
        draft.fc.weight[:identity_width] = torch.eye(identity_width, draft.fc.in_features)
        keys_from = slice(width + _CODE.start, width + _CODE.stop)
        _write_induction_head(draft.midlayer.self_attn, config, keys_from=keys_from)


def _frequencies(config: LlamaConfig) -> Tensor:
    half: int = config.head_dim // 2
    return torch.pow(ROPE_THETA, -torch.arange(half) / half)


def _clear_first_heads(attention: Projections, config: LlamaConfig) -> list[tuple[int, int]]:
    """Damp the first query head of each KV group; return the groups' (query, key) first rows."""
    head_dim = config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    heads = [
        (kv_head * group * head_dim, kv_head * head_dim)
        for kv_head in range(config.num_key_value_heads)
    ]
    for query, key in heads:
        attention.q_proj.weight[query : query + head_dim] *= _DAMPING
        attention.o_proj.weight[:, query : query + head_dim] *= _DAMPING
        attention.k_proj.weight[key : key + head_dim] *= _DAMPING
        attention.v_proj.weight[key : key + head_dim] *= _DAMPING
    return heads


def _write_previous_token_head(attention: Projections, config: LlamaConfig) -> None:
    """Make the first head of each KV group attend one token back.

    Every key is the same vector; every query is that vector rotated back by one position. The
    first group's head copies the previous token's code to scratch.
    """
    half = config.head_dim // 2
    turns = _frequencies(config)
    gain = torch.zeros(half)
    gain[:_POSITION_FREQUENCIES] = _POSITION_GAIN
    heads = _clear_first_heads(attention, config)
    for query, key in heads:
        attention.q_proj.weight[query : query + half, _CONSTANT] = gain * torch.cos(turns)
        attention.q_proj.weight[query + half : query + 2 * half, _CONSTANT] = -gain * torch.sin(
            turns
        )
        attention.k_proj.weight[key : key + half, _CONSTANT] = gain
    query, key = heads[0]
    copy = torch.eye(_CODE_WIDTH) * _PREVIOUS_GAIN
    attention.v_proj.weight[key : key + _CODE_WIDTH, _CODE] = copy
    attention.o_proj.weight[_SCRATCH, query : query + _CODE_WIDTH] = copy


def _write_induction_head(attention: Projections, config: LlamaConfig, keys_from: slice) -> None:
    """Attend where the code at `keys_from` equals the token's code; copy that token to scratch.

    Only the slowest RoPE channels compare codes, so that distance hardly matters. Each KV group
    compares its own part of the code.
    """
    half = config.head_dim // 2
    slow = torch.nonzero(_frequencies(config) < _MATCH_SLOWEST_TURN).flatten()
    channels = torch.cat([slow, slow + half])
    copy = torch.eye(_CODE_WIDTH) * _COPY_GAIN
    for group, (query, key) in enumerate(_clear_first_heads(attention, config)):
        compared = (group * len(channels) + torch.arange(len(channels))) % _CODE_WIDTH
        attention.q_proj.weight[query + channels, _CODE.start + compared] = _MATCH_GAIN
        attention.k_proj.weight[key + channels, keys_from.start + compared] = _MATCH_GAIN
        attention.v_proj.weight[key : key + _CODE_WIDTH, _CODE] = copy
        attention.o_proj.weight[_SCRATCH, query : query + _CODE_WIDTH] = copy
