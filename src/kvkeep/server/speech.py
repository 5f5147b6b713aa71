"""What a model says in a chat: reasoning, content and tool calls, from text in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .incremental import Malformed, Steps, Text
from .tool_formats import Format

Said = Literal["content", "reasoning"]
Tags = tuple[str, str]
"""What begins and ends reasoning."""

REASONING: dict[str, Tags] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "kimi": ("◁think▷", "◁/think▷"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
ALIASES = dict.fromkeys(("deepseek_r1", "deepseek-r1", "glm45", "qwen3", "qwen3-thinking"), "think")
"""Names that SGLang and vLLM have for ``think``."""


def tags_of(name: str, template: str) -> Tags | None:
    """The tags of this name, "auto": those that ``template`` has; None: there are none."""
    if name == "auto":
        return next(
            (tags for tags in REASONING.values() if any(tag in template for tag in tags)), None
        )
    return REASONING.get(ALIASES.get(name, name))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer.

    A call begins with its ``name``; ``arguments``, as JSON, follow in pieces. ``broken``: what
    looked like a call is none, its whole text follows as content.
    """

    kind: Literal["content", "reasoning", "name", "arguments", "broken"]
    text: str
    call: int = -1  # which, of those that have begun


@dataclass(frozen=True, slots=True)
class Dialect:
    """What to look for in one answer."""

    format: Format | None = None  # None: no calls
    tools: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # name -> schema
    several: bool = True  # False: after one call, all is content
    tags: Tags | None = None  # None: no reasoning
    opened: bool = False  # the prompt ends within reasoning
    separate: bool = True  # False: reasoning and its tags are content


class Speech:
    """Reads one answer. Any cutting of a text gives the same parts, but for their own cuts.

    What is not a well-formed call of a known tool is content. Whitespace before and between calls
    belongs to them, newlines beside the tags of reasoning to those. Nothing else is lost.
    """

    def __init__(self, dialect: Dialect) -> None:
        self.tools, self.several = dialect.tools, dialect.several
        self.reasoning = self.thought = dialect.opened and dialect.tags is not None
        self.calls = 0  # complete ones
        self.beyond = 0  # characters after the end of reasoning, in the push that ended it
        self._dialect, self._text = dialect, Text()
        self._parts: list[Part] = []
        self._begun, self._open = -1, False
        self._from = self._to = 0  # what becomes content if a call is none; then reading goes on
        self._silent = False  # no content since the last call
        self._steps = self._all()
        next(self._steps, None)

    def push(self, text: str) -> list[Part]:
        """The parts that ``text`` completes."""
        self._text.buffer += text
        return self._resume()

    def finish(self) -> list[Part]:
        """The last parts."""
        self._text.ended = True
        return self._resume()

    def begin(self, name: str) -> None:
        """See :class:`~kvkeep.server.tool_formats.Calls`, as for all methods below."""
        if name not in self.tools or self._open or (self.calls and not self.several):
            raise Malformed
        self._begun, self._open = self._begun + 1, True
        self._parts.append(Part("name", name, self._begun))

    def piece(self, arguments: str) -> None:
        if arguments:
            self._parts.append(Part("arguments", arguments, self._begun))

    def stream(self, steps: Steps[None]) -> Steps[None]:
        sent = self._text.at
        for _ in steps:
            self.piece(self._text.buffer[sent : self._text.at])
            sent = self._text.at
            yield
        self.piece(self._text.buffer[sent : self._text.at])

    def done(self) -> None:
        self._open, self._silent = False, True
        self.calls += 1
        self._from = self._to = self._text.at

    def _resume(self) -> list[Part]:
        next(self._steps, None)
        parts, self._parts = self._parts, []
        return parts

    def _all(self) -> Steps[None]:
        if self._dialect.tags:
            yield from self._think(*self._dialect.tags)
        form = self._dialect.format
        if form:
            yield from self._first(form)
        while form and (self.several or not self.calls):
            if not (yield from self._prose(form.marks, "content", before=True)):
                return
            yield from self._call(form)
        yield from self._prose((), "content", before=form is not None)

    def _think(self, begin: str, end: str) -> Steps[None]:
        separate = self._dialect.separate
        if not self.reasoning:
            yield from self._text.space()
            found = yield from self._text.accept(begin)
            if not (found and separate):
                self._text.at = 0
            if not found:
                return
            self.reasoning = self.thought = True
        if separate:
            yield from self._newlines()
        kind: Said = "reasoning" if separate else "content"
        if not (yield from self._prose((end,), kind, before=separate)):
            return
        self.reasoning = False
        self.beyond = len(self._text.rest)
        if separate:
            yield from self._newlines()
        else:
            self._say("content", end)

    def _newlines(self) -> Steps[None]:
        while (yield from self._text.accept("\n")):
            pass

    def _first(self, form: Format) -> Steps[None]:
        """Calls that begin the answer without a mark."""
        if form.first is None:
            return
        begin = self._text.at
        yield from self._text.space()
        found = (yield from self._text.peek()) == form.first
        self._text.at = begin
        if found:
            self._from = self._to = begin
            yield from self._call(form)

    def _call(self, form: Format) -> Steps[None]:
        """What follows a mark: calls, or text that looks like them."""
        try:
            yield from form.read(self._text, self)
        except Malformed:
            if self._open:
                self._open = False
                self._parts.append(Part("broken", "", self._begun))
            self._say("content", self._text.buffer[self._from : self._to])
            self._text.at = self._to

    def _prose(self, marks: Sequence[str], kind: Said, *, before: bool = False) -> Steps[str]:
        """Pass text on up to the first of ``marks``; return that one, empty at the end.

        Args:
            before: whitespace before a mark belongs to it.
        """
        text = self._text
        while True:
            text.buffer, text.at = text.rest, 0
            found = [(at, mark) for mark in marks if (at := text.buffer.find(mark)) >= 0]
            at, mark = min(found, default=(len(text.buffer), ""))
            known = at if mark or text.ended else at - _begun(text.buffer, marks)
            if before and (mark or not text.ended):
                known = len(text.buffer[:known].rstrip())
            prose = text.buffer[:known]
            if not (text.ended and not mark and self._silent and prose.isspace()):
                self._say(kind, prose)
            self._from, self._to = known, at + len(mark)
            if mark or text.ended:
                text.at = self._to
                return mark
            text.at = known
            yield

    def _say(self, kind: Said, text: str) -> None:
        if text:
            self._silent = False
            self._parts.append(Part(kind, text))


def _begun(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
