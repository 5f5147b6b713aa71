"""Incremental detokenization and stop strings.

The front end makes text of tokens. The engine decodes only requests with stop strings, to find the
token that completes one. Both push the same pieces of tokens, so both find the same end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Detokenizes one request. Holds back the longest suffix that could begin a stop string.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        stop: strings that end the text; excluded from it.
        spelled: special tokens that are part of the text, as others are not.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), spelled: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._spelled: dict[int, str] = {one: tokenizer.id_to_token(one) for one in spelled}
        self._held = ""

    def push(self, tokens: Sequence[int]) -> tuple[str, int | None]:
        """Append ``tokens``; return the text that is now final, and where a stop string ended.

        The second value counts ``tokens`` up to the one that completed a stop string, inclusive.
        It is None if no stop string has appeared.
        """
        for count, token in enumerate(tokens, 1):
            self._held += self._decode(token)
            ends = [at for at in map(self._held.find, self._stop) if at >= 0]
            if ends:
                text, self._held = self._held[: min(ends)], ""
                return text, count
        return self._release(self._withheld()), None

    def flush(self) -> str:
        """Return the held-back text, at the end of a text without a stop string."""
        return self._release(0)

    def _decode(self, token: int) -> str:
        """Text that ``token`` completes; empty inside a multi-token character."""
        if spelled := self._spelled.get(token):
            return spelled
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # the token made the pending bytes invalid UTF-8: restart the stream
            self._stream = DecodeStream(skip_special_tokens=True)
            return "\N{REPLACEMENT CHARACTER}" + (self._stream.step(self._tokenizer, token) or "")

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _withheld(self) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stop):
                return size
        return 0
