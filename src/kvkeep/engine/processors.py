"""Logits processors: what a request's own rules make of the target's logits.

They act on every row that a step draws from. In a speculative round, row i is processed as if the
first i proposals were accepted: if they are not, nothing is drawn from it. So a round draws what
steps of one token would draw.

The order is that of transformers (bias, repetition penalty, minimum length), with OpenAI's
penalties after the repetition penalty and the grammar last. Temperature, top-k, top-p and min-p
follow in :mod:`~kvkeep.engine.sampling`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .grammar import Matcher
from .messages import Sampling


class Processors:
    """The rules of one request. The engine's thread only.

    Args:
        prompt: int32 tokens.
        ends: tokens that ``min_tokens`` holds back.
        matcher: follows the request's grammar; None: it has none.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: NDArray[np.int32],
        ends: Collection[int],
        matcher: Matcher | None,
    ) -> None:
        self._sampling, self._prompt, self._matcher = sampling, np.unique(prompt), matcher
        self._ends = sorted(ends)
        bias = sampling.logit_bias
        self._bias = list(bias), torch.tensor(list(bias.values()), dtype=torch.float32)

    def apply(self, logits: Tensor, answer: NDArray[np.int32], chain: Sequence[int]) -> None:
        """Change rows of logits in place.

        Args:
            logits: ``[1 + len(chain), vocab]`` float32.
            answer: accepted tokens after the prompt.
            chain: proposed tokens after those.
        """
        for i, row in enumerate(logits):
            self._apply(row, np.concatenate((answer, np.array(chain[:i], dtype=np.int32))))
        if self._matcher is not None:
            self._matcher.mask(logits, chain)

    def accept(self, tokens: Sequence[int]) -> None:
        """Note that these follow the tokens accepted before."""
        if self._matcher is not None:
            self._matcher.accept(tokens)

    def _apply(self, row: Tensor, answer: NDArray[np.int32]) -> None:
        rules = self._sampling
        ids, values = self._bias
        if ids:
            row[ids] += values.to(row.device)
        if rules.repetition_penalty != 1:
            seen = torch.from_numpy(np.union1d(self._prompt, answer).astype(np.int64))
            score, penalty = row[seen.to(row.device)], rules.repetition_penalty
            row[seen.to(row.device)] = torch.where(score < 0, score * penalty, score / penalty)
        if rules.frequency_penalty or rules.presence_penalty:
            said, times = np.unique(answer, return_counts=True)
            less = rules.frequency_penalty * times + rules.presence_penalty
            row[said.tolist()] -= torch.from_numpy(less).to(row)
        if len(answer) < rules.min_tokens:
            row[self._ends] = -torch.inf
