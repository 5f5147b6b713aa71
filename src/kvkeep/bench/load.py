"""The sequences that trees are measured with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 128_000
GROUPS = 20  # sequences ``i`` and ``i + GROUPS`` share their first half, as of one application


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences of one length."""

    tokens: NDArray[np.int32]  # [sequences, length]
    page_tokens: int

    @property
    def sequences(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of each."""
        return int(self.tokens.shape[1])

    @property
    def pages(self) -> int:
        """Of all sequences, had they nothing in common."""
        return self.tokens.size // self.page_tokens


def make_load(sequences: int, length: int, page_tokens: int, groups: int = GROUPS) -> Load:
    """The same at every call. With as many groups as sequences, they have nothing in common."""
    random = np.random.default_rng(sequences + length)
    tokens = random.integers(VOCABULARY, size=(sequences, length), dtype=np.int32)
    for i in range(groups, sequences):
        tokens[i, : length // 2] = tokens[i % groups, : length // 2]
    return Load(tokens, page_tokens)
