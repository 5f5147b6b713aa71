"""From processed logits to tokens, with noise that depends only on the seed and the position.

Each token is drawn by inverting the cumulative distribution at one uniform number, a hash of
``(seed, position)``. So a request draws the same tokens if it is preempted and resumed, batched
differently, or verified several tokens at a time.

This makes speculation lossless. A draft proposes one token per position, and the engine accepts it
if and only if it equals the target's own draw there. That happens with the target's probability of
the token, which is the acceptance probability of speculative sampling for such a proposal
(Leviathan et al. 2023; Chen et al. 2023). A rejected position already has a draw from the target's
distribution.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from .messages import Sampling


class Draw(NamedTuple):
    """One token to be drawn."""

    sampling: Sampling
    seed: int  # used modulo 2**64
    position: int  # of the new token in its sequence


def uniform(seed: int, position: int) -> float:
    """A pseudo-random number in [0, 1) with 53 bits."""
    key = struct.pack("<QQ", seed % 2**64, position)
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw one token per row: apply temperature, then top-k, top-p and min-p, each to what the one
    before left.

    Args:
        logits: ``[rows, vocab]`` float32.
        draws: one per row. Temperature 0 takes the largest logit, the first one of equals.

    Returns:
        ``[rows]`` int64 tokens.
    """
    tokens = logits.argmax(-1)
    hot = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
    cut = {i for i in hot if draws[i].sampling.top_k > 0 or draws[i].sampling.top_p < 1}
    free = [i for i in hot if i not in cut]
    for rows, pick in ((free, _pick), (sorted(cut), _pick_filtered)):
        if rows:
            tokens[rows] = pick(logits[rows], [draws[i] for i in rows])
    return tokens


def _pick(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw from all tokens; the cumulative distribution follows their ids."""
    weights = _weights(scores, scores.amax(-1, keepdim=True), draws)
    return _invert(_likely(weights, draws), draws)[:, 0]


def _pick_filtered(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Draw from the likeliest tokens; slower, because it sorts the vocabulary by likelihood."""
    vocab = scores.shape[-1]
    top_k = _column([d.sampling.top_k if d.sampling.top_k > 0 else vocab for d in draws], scores)
    top_p = _column([draw.sampling.top_p for draw in draws], scores)
    # A stable sort keeps equal logits in order of their ids, so equal inputs give equal tokens.
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    weights = _weights(scores, scores[:, :1], draws)
    weights.masked_fill_(torch.arange(vocab, device=scores.device) >= top_k, 0)
    # Keep the shortest prefix with mass top_p: a token stays if less than top_p precedes it.
    total = weights.cumsum(-1)
    weights.masked_fill_(total - weights >= top_p * total[:, -1:], 0)
    return order.gather(1, _invert(_likely(weights, draws), draws))[:, 0]


def _weights(scores: Tensor, best: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Unnormalised probabilities at each draw's temperature, float64; the best token's is 1."""
    temperature = _column([draw.sampling.temperature for draw in draws], scores)
    return ((scores.double() - best) / temperature).exp_()


def _likely(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Without tokens below min-p; the likeliest token's weight is 1."""
    if any(draw.sampling.min_p for draw in draws):
        weights.masked_fill_(weights < _column([d.sampling.min_p for d in draws], weights), 0)
    return weights


def _invert(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """``[rows, 1]``: where each draw's noise falls in the cumulative ``weights [rows, vocab]``."""
    total = weights.cumsum(-1)
    noise = _column([uniform(draw.seed, draw.position) for draw in draws], weights)
    found = torch.searchsorted(total, noise * total[:, -1:], right=True)
    # Rounding may lead past the last possible token, and NaN weights anywhere.
    ids = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, ids, 0).amax(-1, keepdim=True)
    return found.minimum(last)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]
