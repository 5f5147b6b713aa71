"""Rows of the target's logits: what a step draws from, and the log-probabilities of tokens.

Log-probabilities are those of the model: before any processor and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .messages import TokenLogprobs
from .request import RequestState


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that one request draws from in a step."""

    processed: Tensor  # [draws, vocab] float32
    raw: Tensor | None  # the same before processing; None: no log-probabilities are wanted
    top: int  # likeliest tokens wanted in each place

    @classmethod
    def of(cls, seq: RequestState, chain: Sequence[int], logits: Tensor, draws: int) -> Rows:
        """The last ``draws`` of a request's rows; it changes them in place.

        Args:
            chain: proposed tokens; row i of those drawn from follows i of them.
            logits: ``[kept, vocab]`` float32: all rows if the prompt's are wanted.
        """
        if seq.request.prompt_logprobs:
            _note_prompt(seq, logits)
        sampling = seq.request.sampling
        rows = logits[len(logits) - draws :]
        raw = None if sampling.logprobs is None else rows
        if seq.processors is not None and draws:
            raw = raw if raw is None else raw.clone()
            seq.processors.apply(rows, seq.tokens[seq.prompt_length :], chain)
        return cls(rows, raw, sampling.logprobs or 0)

    def logprobs(self, tokens: Sequence[int]) -> list[TokenLogprobs] | None:
        """Of the first tokens drawn; None: not wanted."""
        return None if self.raw is None else logprobs(self.raw[: len(tokens)], tokens, self.top)


def logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of ``tokens``, and of the ``top`` likeliest ones in each place.

    Args:
        logits: ``[n, vocab]`` float32; row i is the distribution of token i.
        tokens: n token ids.
    """
    scores = logits.log_softmax(-1)
    index = torch.tensor(tokens, dtype=torch.int64, device=scores.device)[:, None]
    mine = scores.gather(1, index)[:, 0].tolist()
    best = scores.topk(min(top, scores.shape[-1]), -1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(value, list(zip(ids, values, strict=True)))
        for value, (ids, values) in zip(mine, pairs, strict=True)
    ]


def _note_prompt(seq: RequestState, logits: Tensor) -> None:
    """Note log-probabilities of the prompt's tokens that follow these rows, each once."""
    first = max(seq.computed, len(seq.prompt_logprobs))
    end = min(seq.computed + len(logits), seq.prompt_length - 1)
    if first < end:
        rows = logits[first - seq.computed : end - seq.computed]
        tokens = seq.tokens[first + 1 : end + 1].tolist()
        seq.prompt_logprobs += logprobs(rows, tokens, seq.request.sampling.logprobs or 0)
