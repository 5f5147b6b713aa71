"""Encodes prompts and chats into tokens."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any, Protocol, cast

from jinja2 import TemplateError

from ..schema import RequestError
from .limits import check_count
from .protocol import Message, Prompt


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the server uses."""

    @property
    def chat_template(self) -> Any:
        """A Jinja template, or None if the model has none."""

    @property
    def encode(self) -> Any: ...

    @property
    def apply_chat_template(self) -> Any: ...


class Encoder:
    """Encodes prompts and chats in a worker thread, so that long texts do not block the loop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, most_prompts: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._most_prompts = most_prompts
        self._tokenizer_lock = asyncio.Lock()  # Hugging Face tokenizers are not thread-safe

    async def prompts(self, prompt: Prompt) -> list[list[int]]:
        """Tokens of each prompt in ``prompt``, which is one or several, text or token ids.

        Raises:
            RequestError: there are too many prompts; or one is empty, is not valid Unicode, or has
                a token outside the vocabulary.
        """
        one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        several = cast(list[str | list[int]], [prompt] if one else prompt)
        check_count(several, self._most_prompts)
        return [await self._encode(each, special=True) for each in several]

    async def chat(self, messages: list[Message], variables: dict[str, Any]) -> list[int]:
        """Tokens of ``messages`` in the model's chat template, with the generation prompt.

        Args:
            variables: further variables of the template.

        Raises:
            RequestError: the model has no chat template, the template rejects the messages, or
                ``variables`` sets a parameter of ``apply_chat_template``.
        """
        if self._tokenizer.chat_template is None:
            raise RequestError("messages need a chat template, which this model does not have")
        if not messages:
            raise RequestError("messages must not be empty")
        render = self._tokenizer.apply_chat_template
        reserved = inspect.signature(render).parameters.keys() - {"add_generation_prompt"}
        if forbidden := reserved & variables.keys():
            raise RequestError(f"chat_template_kwargs must not set {min(forbidden)!r}")
        turns = [message.flat() for message in messages]
        try:
            text = render(turns, tokenize=False, **{"add_generation_prompt": True} | variables)
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"messages do not fit the chat template: {error}") from error
        return await self._encode(text, special=False)

    async def _encode(self, prompt: str | list[int], special: bool) -> list[int]:
        if not prompt:
            raise RequestError("prompt must not be empty")
        if isinstance(prompt, list):
            return self._checked(prompt)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # JSON can contain a lone surrogate
            raise RequestError(f"prompt is not valid Unicode: {error.reason}") from None
        async with self._tokenizer_lock:
            encode = self._tokenizer.encode
            return list(await asyncio.to_thread(encode, prompt, add_special_tokens=special))

    def _checked(self, tokens: list[int]) -> list[int]:
        for worst in (min(tokens), max(tokens)):
            if not 0 <= worst < self._vocab_size:
                raise RequestError(
                    f"prompt has token {worst}, which is not in the vocabulary "
                    f"of {self._vocab_size} tokens"
                )
        return tokens
