"""Log-probabilities in the formats of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from ..engine.messages import TokenLogprobs

Spell = Callable[[int], str]
"""The text of one token alone."""

Found = Sequence[TokenLogprobs]
"""Of each token."""


def of_completion(spell: Spell, tokens: Sequence[int], found: Found, start: int) -> dict[str, Any]:
    """The ``logprobs`` of a choice of ``/v1/completions``; ``start``: length of the text before."""
    texts = [spell(token) for token in tokens]
    offsets = accumulate(map(len, texts[:-1]), initial=start)
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [{spell(i): value for i, value in one.top} or None for one in found],
        "text_offset": list(offsets) if texts else [],
    }


def of_chat(spell: Spell, tokens: Sequence[int], found: Found, start: int) -> dict[str, Any]:
    """The ``logprobs`` of a choice of ``/v1/chat/completions``."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(token, one.logprob) | {"top_logprobs": [entry(*other) for other in one.top]}
        for token, one in zip(tokens, found, strict=True)
    ]
    return {"content": content, "refusal": None}
