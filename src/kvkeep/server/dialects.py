"""What to look for in the answers of one model, and what a chat's answer must match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..engine.messages import Grammar
from ..schema import RequestError
from .protocol import ChatRequest
from .speech import Dialect, tags_of
from .tokens import Tokenizer
from .tool_formats import JSON, format_of
from .tool_grammar import Lark
from .tools import Tool

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one chat."""

    dialect: Dialect
    grammar: Grammar | None  # None: any answer
    spelled: tuple[int, ...]  # special tokens that are text

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of :class:`~kvkeep.engine.messages.Sampling`."""
        return {"grammar": self.grammar, "spelled": self.spelled}


class Dialects:
    """How one model writes tool calls and reasoning.

    Args:
        tool_format: a name of a format, "auto" or "none".
        reasoning: likewise.
    """

    def __init__(self, tokenizer: Tokenizer, tool_format: str, reasoning: str) -> None:
        found = tokenizer.chat_template or ""
        template = "\n".join(found.values()) if type(found) is dict else str(found)
        self._tokenizer = tokenizer
        self._format = format_of(tool_format, template)
        self._tags = tags_of(reasoning, template)

    @cached_property
    def _special(self) -> dict[str, int]:
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    def plan(self, body: ChatRequest, ending: str) -> Plan:
        """How to read the answer to ``body``, and what it must match.

        Args:
            ending: the last characters of the prompt.

        Raises:
            RequestError: the fields about tools do not fit each other.
        """
        tools, forced = body.usable, body.tool_choice not in ("none", "auto")
        form = self._format if tools else None
        if forced and not (form and form.frame):
            form = JSON
        tags = self._tags
        if tags and ending.rstrip().endswith(tags[1]):
            tags = None
        dialect = Dialect(
            form,
            {tool.function.name: tool.schema_of_arguments for tool in tools},
            body.parallel_tool_calls,
            tags,
            tags is not None and ending.rstrip().endswith(tags[0]),
            body.separate_reasoning,
        )
        marks = {*(form.marks + form.inner if form else ()), *(tags or ())}
        special = {text: self._special[text] for text in marks if text in self._special}
        grammar = self._grammar(body, tools, forced, dialect, special)
        return Plan(dialect, grammar, tuple(special.values()))

    def _grammar(
        self,
        body: ChatRequest,
        tools: list[Tool],
        forced: bool,
        dialect: Dialect,
        special: Mapping[str, int],
    ) -> Grammar | None:
        given, form, lark = body.grammar, dialect.format, Lark(special)
        frame = form.frame if form else None
        if forced and given:
            raise RequestError("tool_choice and a format of the answer exclude each other")
        if forced and frame:
            several = dialect.several and body.tool_choice == "required"
            start = lark.calls(frame, dialect.tools, several)
        elif form and frame and (given or any(tool.function.strict for tool in tools)):
            schemas = {
                tool.function.name: tool.schema_of_arguments
                if tool.function.strict
                else _ANY_OBJECT
                for tool in tools
            }
            if given:
                start = f"{lark.given(given)} | {lark.calls(frame, schemas, dialect.several)}"
            else:
                start = lark.maybe_calls(form, frame, schemas, dialect.several)
        elif given and dialect.tags:
            start = lark.given(given)
        else:
            return given
        if dialect.tags:
            start = lark.after_reasoning(dialect.tags, dialect.opened, start)
        return lark.grammar(start)
