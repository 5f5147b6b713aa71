"""Trains the draft with EAGLE-3's training-time test: it learns on its own outputs.

Row p of a sequence holds (embedding of token p + 1, feature of token p), has RoPE position p and
predicts token p + 2. In pass 0 the features are the target's. In pass k they are the outputs of
pass k - 1, so the draft learns the k-th token of a chain from the inputs it has when drafting it.
"""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from .data import Corpus, Mixture, Sampler
from .model import Draft, features, new_draft
from .optimize import Optimizers, Phase, train
from .structure import structure_draft

DRAFT_STEPS = 7
_DECAY = 0.85  # of the loss per pass
_PHASES = (Phase(200, 4, 256), Phase(150, 2, 512), Phase(150, 1, 1024))
_MIXTURE = Mixture(text=0.2, repeated_text=0.2, gaps=0.0, copies=4)
_WARMUP = 30


def train_draft(target: LlamaForCausalLM, corpus: Corpus, seed: int = 1) -> Draft:
    """Return a draft trained to predict the output distributions of the exported `target`."""
    torch.manual_seed(seed)
    sampler = Sampler(corpus, _MIXTURE, seed)
    draft = new_draft()
    structure_draft(draft, target)
    draft.train()

    def loss_of(rows: int, length: int) -> tuple[Tensor, str]:
        tokens = sampler.batch(rows, length)
        with torch.no_grad():
            seen = target(tokens, use_cache=False, output_hidden_states=True)
        losses, hits = _passes(
            draft, features(seen.hidden_states), seen.hidden_states[0], seen.logits
        )
        loss = sum(_DECAY**k * one for k, one in enumerate(losses))
        assert isinstance(loss, Tensor)
        return loss, "accuracy " + " ".join(f"{hit:.2f}" for hit in hits)

    train("draft", _PHASES, _WARMUP, Optimizers(draft, 0.01, 2e-3), loss_of)
    return draft.eval()


def _passes(
    draft: Draft, feature: Tensor, embeddings: Tensor, logits: Tensor
) -> tuple[list[Tensor], list[float]]:
    """Return each pass's loss and its share of rows that agree with the target's first choice.

    All inputs are the target's, `[rows, tokens, ...]`.
    """
    hidden = draft.fc(feature[:, :-1])
    embeddings = embeddings[:, 1:]
    wanted = logits[:, 1:].softmax(-1)
    positions = torch.arange(embeddings.shape[1]).unsqueeze(0)
    attention = _ChainAttention(
        draft.config.num_attention_heads // draft.config.num_key_value_heads
    )
    losses, hits = [], []
    for k in range(DRAFT_STEPS):
        # Pass k computes rows from k on; row p's feature is pass k - 1's output at row p - 1.
        if k:
            hidden = hidden[:, :-1]
        query, key, value = draft.project(embeddings[:, k:], hidden, positions[:, k:])
        hidden = draft.finish(attention(query, key, value), hidden)
        scores = draft.logits(hidden)
        target = wanted[:, k:]
        losses.append(functional.cross_entropy(scores.flatten(0, 1), target.flatten(0, 1)))
        hits.append((scores.argmax(-1) == target.argmax(-1)).float().mean().item())
    return losses, hits


class _ChainAttention:
    """Attention of all chains of a sequence at once, one pass after another.

    In pass k, the chain that starts at row r attends to rows 0..r of pass 0 and to its own rows:
    row r + 1 of pass 1, ..., row r + k of pass k. The first row of a pass's tensors belongs to
    chain r = 0, so the row of pass m for chain r is at index r of that pass's tensors.
    """

    def __init__(self, group: int) -> None:
        self._group = group  # query heads per KV head
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add the pass's rows and attend: all `[batch, heads, chains, head_dim]`."""
        self._keys.append(key.repeat_interleave(self._group, dim=1))
        self._values.append(value.repeat_interleave(self._group, dim=1))
        prompt_keys, *own_keys = self._keys
        prompt_values, *own_values = self._values
        if not own_keys:
            return functional.scaled_dot_product_attention(
                query, prompt_keys, prompt_values, is_causal=True
            )
        chains = query.shape[2]
        query = query * query.shape[-1] ** -0.5
        future = torch.ones(chains, chains, dtype=torch.bool).triu(1)
        prompt_scores = query @ prompt_keys[:, :, :chains].transpose(-1, -2)
        prompt_scores = prompt_scores.masked_fill(future, float("-inf"))
        own_scores = [(query * keys[:, :, :chains]).sum(-1, keepdim=True) for keys in own_keys]
        weights = torch.cat([prompt_scores, *own_scores], dim=-1).softmax(-1)
        attended = weights[..., :chains] @ prompt_values[:, :, :chains]
        for m, values in enumerate(own_values):
            attended = attended + weights[..., chains + m, None] * values[:, :, :chains]
        return attended
