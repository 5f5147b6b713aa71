"""Reads text that arrives in pieces: generators that pause where they need more of it."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A read that yields where it needs more text, and returns its result."""

MOST_LEVELS = 64
"""Nesting of a JSON value."""

_SPACE = re.compile(r"\s*")
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_LETTERS = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
_VALID_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
_MOST_SCALAR = 1024  # characters


class Malformed(Exception):
    """The text is not what was expected, or ends too early."""


class Text:
    """Text so far, and how much of it was read. ``at`` counts characters of ``buffer``."""

    def __init__(self) -> None:
        self.buffer, self.at, self.ended = "", 0, False

    @property
    def rest(self) -> str:
        """What has not been read."""
        return self.buffer[self.at :]

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self.at == len(self.buffer) and not self.ended:
            yield
        return self.buffer[self.at : self.at + 1]

    def accept(self, literal: str) -> Steps[bool]:
        """Read ``literal`` if it comes next."""
        while not self.ended:
            come = self.buffer[self.at : self.at + len(literal)]
            if len(come) == len(literal) or not literal.startswith(come):
                break
            yield
        found = self.buffer.startswith(literal, self.at)
        self.at += found * len(literal)
        return found

    def expect(self, literal: str) -> Steps[None]:
        """Read ``literal``."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def space(self) -> Steps[None]:
        """Read whitespace, if there is any."""
        yield from self.run(_SPACE)

    def skip(self, literal: str) -> Steps[bool]:
        """Read whitespace and ``literal`` if that is what comes next; else nothing."""
        before = self.at
        yield from self.space()
        if found := (yield from self.accept(literal)):
            return found
        self.at = before
        return False

    def until(self, literals: Sequence[str], most: int | None = None) -> Steps[tuple[str, str]]:
        """Read up to and with the first of ``literals``; return what is before it, and which.

        Args:
            most: characters before it, at most.
        """
        searched = self.at
        longest = max(map(len, literals))
        while True:
            places = [(self.buffer.find(each, searched), each) for each in literals]
            if found := [one for one in places if one[0] >= 0]:
                end, literal = min(found)
                text = self.buffer[self.at : end]
                if most is not None and len(text) > most:
                    raise Malformed
                self.at = end + len(literal)
                return text, literal
            come = len(self.buffer)
            if self.ended or (most is not None and come - self.at >= most + longest):
                raise Malformed
            searched = max(self.at, come - longest + 1)
            yield

    def string(self) -> Steps[str]:
        """Read a JSON string; return it as it is written, quotes included."""
        begin = self.at
        yield from self.expect('"')
        while True:
            yield from self.run(_LETTERS)
            if (yield from self.accept('"')):
                return self.buffer[begin : self.at]
            while not (escape := _ESCAPE.match(self.buffer, self.at)):
                if self.ended or not _BEGUN_ESCAPE.fullmatch(self.buffer, self.at):
                    raise Malformed
                yield
            self.at = escape.end()

    def value(self, levels: int = MOST_LEVELS) -> Steps[None]:
        """Read a JSON value, and whitespace before it."""
        yield from self._json_space()
        first = yield from self.peek()
        if first == '"':
            yield from self.string()
        elif first == "{":
            yield from self._items("{", "}", levels)
        elif first == "[":
            yield from self._items("[", "]", levels)
        else:
            begin = self.at
            yield from self.run(_SCALAR, _MOST_SCALAR)
            if not _VALID_SCALAR.fullmatch(self.buffer, begin, self.at):
                raise Malformed

    def next_item(self, end: str) -> Steps[bool]:
        """Read what follows an item of a JSON object or array: a comma, or ``end``.

        Returns whether another item follows.
        """
        yield from self._json_space()
        if (yield from self.accept(end)):
            return False
        yield from self.expect(",")
        yield from self._json_space()
        return True

    def key(self) -> Steps[str]:
        """Read the key of a JSON object's item, colon included; return it as it is written."""
        key = yield from self.string()
        yield from self._json_space()
        yield from self.expect(":")
        yield from self._json_space()
        return key

    def open(self, begin: str, end: str) -> Steps[bool]:
        """Read the ``begin`` of a JSON object or array; if it is empty, ``end``, too.

        Returns whether an item follows.
        """
        yield from self.expect(begin)
        yield from self._json_space()
        return not (yield from self.accept(end))

    def _items(self, begin: str, end: str, levels: int) -> Steps[None]:
        if not levels:
            raise Malformed
        more = yield from self.open(begin, end)
        while more:
            if end == "}":
                yield from self.key()
            yield from self.value(levels - 1)
            more = yield from self.next_item(end)

    def _json_space(self) -> Steps[None]:
        yield from self.run(_JSON_SPACE)

    def run(self, pattern: re.Pattern[str], most: int | None = None) -> Steps[None]:
        """Read all that ``pattern``, which matches single characters, matches."""
        begin = self.at
        while match := pattern.match(self.buffer, self.at):
            self.at = match.end()
            if most is not None and self.at - begin > most:
                raise Malformed
            if self.at < len(self.buffer) or self.ended:
                return
            yield
