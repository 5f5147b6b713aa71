"""Prompts that repeat themselves, on which the demo's draft predicts nearly every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...demo.run import TARGET
from ..serving.prompts import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PERIODS = (64, 200)
PROMPT_TOKENS = 1024
VOCABULARY, _SPECIAL = 2048, 2  # of the demo's tokenizer


def demo_prompt(period: int, index: int) -> list[int]:
    """The demo's prompt number ``index``: a block of distinct random tokens, repeated.

    ``../../demo/prompts.json`` has the first four of each period, and of decoys, whose period is
    1,024.
    """
    ordinary = np.random.default_rng((period, index)).permutation(VOCABULARY - _SPECIAL)
    tokens: list[int] = np.resize(ordinary[:period] + _SPECIAL, PROMPT_TOKENS).tolist()
    return tokens


class Words:
    """Tokens that are a word with a space before it: their text encodes to them again."""

    def __init__(self) -> None:
        self._tokenizer: Tokenizer = read_tokenizer(TARGET)
        self._ids = [token for token in range(_SPECIAL, VOCABULARY) if self._is_word(token)]

    def _is_word(self, token: int) -> bool:
        text = self._tokenizer.decode([token])
        word = text.removeprefix(" ")
        plain = word != text and word.isascii() and word.isalpha()
        return plain and self._tokenizer.encode(text * 2).ids == [token] * 2

    def repeated(self, period: int, tokens: int, seed: int) -> list[int]:
        """A block of ``period`` distinct words, repeated until there are so many tokens."""
        block = np.random.default_rng(seed).permutation(self._ids)[:period]
        found: list[int] = np.resize(block, tokens).tolist()
        return found

    def text(self, tokens: list[int]) -> str:
        """Their text."""
        text: str = self._tokenizer.decode(tokens)
        return text
