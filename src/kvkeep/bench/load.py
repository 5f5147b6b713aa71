"""The sequences that trees are measured with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 128_000
GROUPS = 20  # of sequences that share their first half, as users of one application do


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences of one length. Sequence ``i`` shares its first half with ``i + GROUPS``."""

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

    @property
    def distinct(self) -> int:
        """Pages that differ."""
        half = self.length // 2 // self.page_tokens
        return half * (self.sequences + min(GROUPS, self.sequences))


def make_load(sequences: int, length: int, page_tokens: int) -> Load:
    """The same at every call."""
    random = np.random.default_rng(sequences + length)
    tokens = random.integers(VOCABULARY, size=(sequences, length), dtype=np.int32)
    for i in range(GROUPS, sequences):
        tokens[i, : length // 2] = tokens[i % GROUPS, : length // 2]
    return Load(tokens, page_tokens)
