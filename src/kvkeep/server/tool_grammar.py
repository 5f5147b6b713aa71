"""Grammars of answers with tool calls and reasoning, in llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..engine.messages import JSON_SPACE, Grammar
from ..schema import RequestError
from .speech import Tags
from .tool_formats import Format, Frame

_ANY = r"/(.|\n)*/"


class Lark:
    """Makes one grammar.

    Args:
        special: id of each special token by its text; in a grammar such a token is no text.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        escaped = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._split = re.compile(f"({escaped})" if escaped else "(?!)")
        self._rules: dict[str, str] = {}

    def grammar(self, start: str) -> Grammar:
        """Of answers that match the expression ``start``."""
        return Grammar("lark", "\n".join([f"start: {start}", *self._rules.values()]))

    def given(self, grammar: Grammar) -> str:
        """An expression that matches what ``grammar``, a JSON schema or a regex, does.

        Raises:
            RequestError: the schema is not JSON.
        """
        if grammar.kind == "regex":
            return self._rule("given", _between_slashes(grammar.text))
        try:
            schema = json.loads(grammar.text)
        except (ValueError, RecursionError):
            raise RequestError("json_schema is not valid JSON") from None
        return self._rule("given", _json(schema))

    def after_reasoning(self, tags: Tags, opened: bool, answer: str) -> str:
        """``answer`` after reasoning, which comes if it is ``opened``, and else may come."""
        thought = self._up_to("thought", tags[1]) + " " + self._rule("space", r"/\s{0,8}/")
        if not opened:
            thought = f"({self._literal(tags[0])} {thought})?"
        return f"{thought} ({answer})"

    def calls(self, frame: Frame, schemas: Mapping[str, Any], several: bool, mark: str = "") -> str:
        """Calls of functions in ``schemas``, name -> JSON schema, after ``mark``.

        Args:
            several: False: one call.
        """
        first = self._call(frame, schemas, frame.opening, mark)
        more = f"({self._literal(frame.between)} {self._call(frame, schemas)})*" if several else ""
        return f"{first} {more} {self._literal(frame.closing)}"

    def maybe_calls(
        self, form: Format, frame: Frame, schemas: Mapping[str, Any], several: bool
    ) -> str:
        """Any text; from where a call begins, it is as :meth:`calls` says."""
        if form.first is not None:
            other = self._rule("other", rf"/[^{re.escape(form.first)}\s](.|\n)*/ |")
            return f"{self.calls(frame, schemas, several)} | {other}"
        begin = self._up_to("begin", mark := form.marks[0])
        after = self.calls(frame, schemas, several, mark)
        return f"({begin} {after}){'*' if several else '?'} {self._rule('rest', _ANY)}"

    def _call(
        self, frame: Frame, schemas: Mapping[str, Any], opening: str = "", mark: str = ""
    ) -> str:
        options = []
        for index, (name, schema) in enumerate(schemas.items()):
            arguments = self._rule(f"arguments_{index}", _json(schema))
            before = (opening + frame.before % name).removeprefix(mark)
            options.append(f"{self._literal(before)} {arguments} {self._literal(frame.after)}")
        return f"({' | '.join(options)})"

    def _up_to(self, name: str, mark: str) -> str:
        """Any text up to ``mark``, and that one."""
        if mark in self._special:
            return self._rule(name, f"{_ANY} {self._literal(mark)}")
        self._rules[name] = f"{name}[suffix={_quoted(mark)}]: {_ANY}"
        return name

    def _literal(self, text: str) -> str:
        parts = [part for part in self._split.split(text) if part]
        special = self._special
        return " ".join(f"<[{special[x]}]>" if x in special else _quoted(x) for x in parts)

    def _rule(self, name: str, body: str) -> str:
        self._rules[name] = f"{name}: {body}"
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    if type(schema) is dict:
        schema = schema | {"x-guidance": {"whitespace_pattern": JSON_SPACE}}
    return f"%json {json.dumps(schema)}"


def _between_slashes(regex: str) -> str:
    escapes = {"/": r"\/", "\n": r"\n"}
    inner = re.sub(r"\\.|[/\n]", lambda found: escapes.get(found[0], found[0]), regex, flags=re.S)
    return f"/{inner}/"
