"""Grammars: which tokens may come next, so that an answer is JSON of a schema or fits a regex.

llguidance computes the masks. Each request has a :class:`Matcher`, which follows its accepted
tokens; proposals of a draft are tried in it and taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from ..schema import RequestError
from .messages import JSON_SPACE, Grammar

_COMPILERS: dict[str, Callable[[str], str]] = {
    "json_schema": partial(
        LLMatcher.grammar_from_json_schema, overrides={"whitespace_pattern": JSON_SPACE}
    ),
    "regex": LLMatcher.grammar_from_regex,
    "lark": LLMatcher.grammar_from_lark,
}


class Matcher:
    """Where one request is in its grammar. The engine's thread only."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, logits: Tensor, chain: Sequence[int]) -> None:
        """Exclude tokens that the grammar forbids.

        Args:
            logits: ``[1 + len(chain), vocab]``, changed in place; row i as if the first i tokens of
                ``chain`` were accepted. Rows after a forbidden token stay as they are: nothing is
                drawn from them.
        """
        tried = 0
        for row, token in zip(logits, [*chain, None], strict=True):
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.unpackbits(bits, count=len(row), bitorder="little").view(bool)
            row.masked_fill_(~torch.from_numpy(allowed).to(row.device), -torch.inf)
            if token is None or not self._matcher.try_consume_tokens([token]):
                break
            tried += 1
        self._matcher.rollback(tried)

    def accept(self, tokens: Sequence[int]) -> None:
        """Follow accepted tokens; after the end of the grammar, nothing."""
        self._matcher.try_consume_tokens(list(tokens))


class Grammars:
    """Makes matchers for one tokenizer.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
        vocab_size: tokens that the model may draw; the tokenizer may know fewer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._prepared: LLTokenizer | None = None  # takes up to a second: made for the first one

    def matcher(self, grammar: Grammar) -> Matcher:
        """Raises RequestError if the grammar cannot be compiled."""
        try:
            compiled = _COMPILERS[grammar.kind](grammar.text)
        except ValueError as error:
            raise RequestError(f"the {grammar.kind} cannot be used: {error}") from None
        if self._prepared is None:
            from llguidance.hf import from_tokenizer  # imports transformers

            self._prepared = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size)
        matcher = LLMatcher(self._prepared, compiled)
        if matcher.is_error():
            raise RequestError(f"the {grammar.kind} cannot be used: {matcher.get_error()}")
        return Matcher(matcher)
