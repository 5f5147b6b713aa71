"""Text to tokens and back, in threads: no text waits for a longer one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from ..schema import PromptTooLong, RequestError

T = TypeVar("T")

_LONG = 32_768
"""Characters from which a text is encoded in a thread that is for such texts alone."""


class Tokenizer(Protocol):
    """The part of a fast Hugging Face tokenizer that the server uses."""

    chat_template: Any  # a Jinja template, or None if the model has none

    @property
    def apply_chat_template(self) -> Any: ...

    @property
    def backend_tokenizer(self) -> Any:
        """The ``tokenizers.Tokenizer``."""

    @property
    def split_special_tokens(self) -> bool:
        """Whether special tokens in a text are encoded as any other text."""


class Texts:
    """Encodes and decodes as ``tokenizer.encode`` and ``tokenizer.decode`` do.

    Those change the backend in each call, and hold the interpreter's lock while they encode.
    Here it is set up once, and ``encode_batch_fast`` encodes without that lock.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = tokenizer.split_special_tokens
        self._context = context_length
        longest = max(map(len, self._backend.get_vocab()), default=1)
        self._most = context_length * longest
        self.spell: Callable[[int], str] = lru_cache(1 << 16)(lambda token: self.decode([token]))
        self._short = ThreadPoolExecutor(2, "encode")
        self._long = ThreadPoolExecutor(1, "encode-long")

    async def run(self, work: Callable[[], T], characters: int) -> T:
        """Call ``work``, about this much text, in a thread; not at all if cancelled before."""
        pool = self._short if characters < _LONG else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def encode(self, text: str, special: bool) -> list[int]:
        """Tokens of ``text``, with those that every prompt begins or ends with if ``special``.

        Thread-safe.

        Raises:
            RequestError: ``text`` is empty, or not valid Unicode.
            PromptTooLong: ``text`` has more characters than a context of longest tokens. It is not
                encoded, even if a normalizer would drop most of it.
        """
        if not text:
            raise RequestError("prompt must not be empty")
        if len(text) > self._most:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters; "
                f"this model's maximum context length is {self._context} tokens, "
                f"in characters at most {self._most}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can contain a lone surrogate
            raise RequestError(f"prompt is not valid Unicode: {error.reason}") from None
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        tokens: list[int] = encoding.ids
        return tokens

    def decode(self, tokens: list[int], skip_special: bool = False) -> str:
        """The text of ``tokens``, without special ones if ``skip_special``. Thread-safe."""
        text: str = self._backend.decode(tokens, skip_special_tokens=skip_special)
        return text
