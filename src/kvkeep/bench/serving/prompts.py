"""Prompts of a given number of tokens, and prompts from a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ...schema import ConfigError
from .answers import Answer
from .client import Call

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIRST_ID = 10  # special tokens mostly come first
TRIES = 10  # of a text with the wrong number of tokens
SAMPLE = 4096  # ids of a vocabulary that are looked through for words
PLAIN = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line"
)

P = TypeVar("P", str, list[int], covariant=True)


class Source(Protocol[P]):
    """Draws prompts of one form: text, or token ids. Prompts are joined with ``+``."""

    def draw(self, tokens: int) -> P:
        """A random prompt of so many tokens."""

    def said(self, answer: Answer) -> P:
        """An answer, as a part of the next prompt."""


class IdSource:
    """Token ids in [10, ``vocab_size``), drawn evenly."""

    def __init__(self, random: np.random.Generator, vocab_size: int) -> None:
        self._random, self._vocab_size = random, vocab_size

    def draw(self, tokens: int) -> list[int]:
        ids: list[int] = self._random.integers(FIRST_ID, self._vocab_size, tokens).tolist()
        return ids

    def said(self, answer: Answer) -> list[int]:
        return list(answer.tokens)


class WordSource:
    """Random words of one token each, so that a text has exactly as many tokens as were asked for.

    Args:
        special: count the special tokens that the tokenizer adds to a prompt, too.
    """

    def __init__(self, random: np.random.Generator, tokenizer: Tokenizer, special: bool) -> None:
        self._random, self._tokenizer, self._special = random, tokenizer, special
        size = tokenizer.get_vocab_size()
        ids = random.permutation(size)[:SAMPLE].tolist()
        texts = sorted({tokenizer.decode([token]).strip() for token in ids})
        words = [text for text in texts if text.isascii() and text.isalpha()]
        self._words = [word for word in words if self._cost(f" {word}") == 1]
        if not self._words:
            raise ConfigError("the tokenizer has no words of one token to make prompts of")

    def _cost(self, text: str) -> int:
        """Tokens that ``text`` adds when it is appended."""
        return self._count(text * 3) - self._count(text * 2)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=self._special).ids)

    def draw(self, tokens: int) -> str:
        """A random text of so many tokens.

        Raises:
            ConfigError: none was found, because special tokens alone are more, or because the
                tokenizer joins words.
        """
        words = tokens
        for _ in range(TRIES):
            text = "".join(f" {word}" for word in self._random.choice(self._words, max(words, 0)))
            extra = self._count(text) - tokens
            if not extra:
                return text
            words -= extra
        raise ConfigError(f"the tokenizer makes no text of exactly {tokens} tokens")

    def said(self, answer: Answer) -> str:
        return answer.text


class PlainSource:
    """Common English words, about one token each: for servers that take and return text alone."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random, self._words = random, PLAIN.split()

    def draw(self, tokens: int) -> str:
        return "".join(f" {word}" for word in self._random.choice(self._words, tokens))

    def said(self, answer: Answer) -> str:
        return answer.text


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in a model's directory.

    Raises:
        ConfigError: it cannot be read.
    """
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"--tokenizer {file}: {error}") from None


def lengths(most: int, ratio: float, count: int, random: np.random.Generator) -> list[int]:
    """``count`` lengths, drawn evenly from [``most`` x ``ratio``, ``most``], at least 1.

    ``--random-range-ratio`` means the same in SGLang's benchmark.
    """
    drawn: list[int] = random.integers(max(int(most * ratio), 1), most + 1, count).tolist()
    return drawn


def random_calls(source: Source[Any], inputs: Sequence[int], outputs: Sequence[int]) -> list[Call]:
    """A completion for each pair of an input's and an output's length."""
    return [
        Call({"prompt": source.draw(tokens)}, output, tokens)
        for tokens, output in zip(inputs, outputs, strict=True)
    ]


def file_calls(file: Path, count: int, max_tokens: int) -> list[Call]:
    """The first ``count`` requests of a file with a JSON object per line.

    An object has ``prompt`` (text or token ids) or ``messages``, and may have ``max_tokens`` and
    other fields of the request.

    Raises:
        ConfigError: the file cannot be read, or a line is no such object.
    """
    calls: list[Call] = []
    for number, line in json_lines(file):
        if len(calls) == count:
            break
        if "prompt" not in line and "messages" not in line:
            raise ConfigError(f'{file}:{number} has neither "prompt" nor "messages"')
        own = line.pop("max_tokens", max_tokens)
        if not isinstance(own, int) or own < 1:
            raise ConfigError(f"{file}:{number}: max_tokens must be 1 or more, not {own!r}")
        prompt = line.get("prompt")
        calls.append(Call(line, own, len(prompt) if isinstance(prompt, list) else None))
    if not calls:
        raise ConfigError(f"{file} has no requests")
    return calls


def json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's number, from 1, and its object. Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is no JSON object.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{file}:{number} is not JSON: {error}") from None
            if not isinstance(value, dict):
                raise ConfigError(f"{file}:{number} is not a JSON object")
            yield number, value
