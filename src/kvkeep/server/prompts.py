"""Encodes prompts and chats into tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError

from ..schema import PromptTooLong, RequestError
from .limits import check_count
from .protocol import Message, Prompt
from .tokens import Texts, Tokenizer

_ENDING = 64  # characters


class Rendered(NamedTuple):
    """A chat in the model's template."""

    tokens: list[int]
    ending: str  # the last characters of its text


class Encoder:
    """Encodes prompts and chats. A call that is cancelled before a thread takes it up does nothing.

    Args:
        most_prompts: how many prompts a request may have.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_length: int, vocab_size: int, most_prompts: int
    ) -> None:
        self.texts = Texts(tokenizer, context_length)
        self._tokenizer = tokenizer
        self._context = context_length
        self._vocab_size = vocab_size
        self._most_prompts = most_prompts

    async def prompts(self, prompt: Prompt, *, special: bool = True) -> list[list[int]]:
        """Tokens of each prompt in ``prompt``, which is one or several, text or token ids.

        Args:
            special: with the tokens that every text begins or ends with.

        Raises:
            RequestError: there are too many prompts; or one is empty, is not valid Unicode, or has
                a token outside the vocabulary.
            PromptTooLong: a text is longer than the context can hold.
        """
        one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
        several = cast(list[str | list[int]], [prompt] if one else prompt)
        check_count(several, self._most_prompts)
        if not several or not all(several):
            raise RequestError("prompt must not be empty")
        if isinstance(several[0], list):
            return [self.checked(cast(list[int], each)) for each in several]
        texts = cast(list[str], several)
        return await self.texts.run(
            lambda: [self.texts.encode(each, special) for each in texts],
            sum(map(len, texts)),
        )

    async def chat(
        self,
        messages: list[Message],
        variables: dict[str, Any],
        *,
        special: bool = False,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Rendered:
        """``messages`` in the model's chat template, with the generation prompt.

        Args:
            variables: further variables of the template.
            special: with the tokens that every text begins or ends with, besides the template's.
            tools: functions that the model may call, as OpenAI's ``tools``.

        Raises:
            RequestError: the model has no chat template, the template rejects the messages, or
                ``variables`` sets a parameter of ``apply_chat_template``.
            PromptTooLong: the text is longer than the context can hold.
        """
        if self._tokenizer.chat_template is None:
            raise RequestError("messages need a chat template, which this model does not have")
        if not messages:
            raise RequestError("messages must not be empty")
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters
        if forbidden := (parameters.keys() - {"add_generation_prompt"}) & variables.keys():
            raise RequestError(f"chat_template_kwargs must not set {min(forbidden)!r}")
        given = {"tools": list(tools)} if tools else {}

        def encode() -> Rendered:
            text = self._render(messages, variables | given)
            return Rendered(self.texts.encode(text, special), text[-_ENDING:])

        size = sum(len(message.text) for message in messages)
        return await self.texts.run(encode, size)

    async def text(self, tokens: list[int], skip_special: bool) -> str:
        """The text of ``tokens``."""
        return await self.texts.run(lambda: self.texts.decode(tokens, skip_special), len(tokens))

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        variables = {"add_generation_prompt": True} | variables
        render = partial(self._tokenizer.apply_chat_template, tokenize=False, **variables)
        try:
            try:
                return str(render([message.flat() for message in messages]))
            except TypeError:  # some templates add arguments of calls to text
                return str(render([message.flat(as_objects=False) for message in messages]))
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"messages do not fit the chat template: {error}") from error

    def checked(self, tokens: list[int]) -> list[int]:
        """``tokens`` as they are.

        Raises:
            RequestError: one is not in the vocabulary.
            PromptTooLong: they are more than the context.
        """
        if len(tokens) > self._context:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; "
                f"this model's maximum context length is {self._context} tokens"
            )
        for worst in (min(tokens), max(tokens)):
            if not 0 <= worst < self._vocab_size:
                raise RequestError(
                    f"prompt has token {worst}, which is not in the vocabulary "
                    f"of {self._vocab_size} tokens"
                )
        return tokens
