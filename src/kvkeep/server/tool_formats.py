"""How models write tool calls. Each format is an entry of :data:`FORMATS`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from .incremental import Malformed, Steps, Text

MOST_HEAD = 1024
"""Characters before a call's arguments, at most."""


class Calls(Protocol):
    """Takes the calls that a format reads, in order."""

    tools: Mapping[str, dict[str, Any]]
    """Name -> JSON schema of the arguments."""
    several: bool
    """False: there may be one call only."""

    def begin(self, name: str) -> None:
        """A call begins. Raises :class:`Malformed` if there is no such tool, or may be no call."""

    def piece(self, arguments: str) -> None:
        """More of the arguments of the call, as JSON."""

    def stream(self, steps: Steps[None]) -> Steps[None]:
        """Take what ``steps`` reads as arguments, as it comes."""

    def done(self) -> None:
        """The call is complete."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What a format writes around arguments in JSON. ``before`` has %s for the tool's name."""

    before: str
    after: str
    between: str = "\n"
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes calls.

    ``read`` reads calls from where the first of ``marks`` ends or, at the beginning of an answer
    that begins with ``first``, from there. It raises :class:`Malformed` if there is none.
    """

    names: tuple[str, ...]  # for --tool-call-parser
    signs: tuple[str, ...]  # all of them are in the chat templates of the family, and nowhere else
    marks: tuple[str, ...]  # what begins calls within an answer
    read: Callable[[Text, Calls], Generator[None, None, None]]
    inner: tuple[str, ...] = ()  # what else of a call may be special tokens
    first: str | None = None  # an answer that begins so may be calls without a mark
    frame: Frame | None = None  # None: arguments are not written as JSON
    id_prefix: str = "call_"  # of the ids of calls
    id_digits: int = 24


def _object(text: Text, calls: Calls) -> Steps[None]:
    """A JSON object with a tool's name and its arguments."""
    name, written, streamed = None, "{}", False
    more = yield from text.open("{", "}")
    while more:
        key = json.loads((yield from text.key()))
        if key == "name":
            name = json.loads((yield from text.string()))
        elif key in ("arguments", "parameters"):
            begin = text.at
            if (yield from text.peek()) != "{":
                raise Malformed
            if streamed := name is not None:
                calls.begin(name)
                yield from calls.stream(text.value())
            else:
                yield from text.value()
            written = text.buffer[begin : text.at]
        elif key in ("id", "type"):
            yield from text.string()
        else:
            raise Malformed
        more = yield from text.next_item("}")
    if name is None:
        raise Malformed
    if not streamed:
        calls.begin(name)
        calls.piece(written)
    calls.done()


def _hermes(text: Text, calls: Calls) -> Steps[None]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``"""
    yield from text.space()
    yield from _object(text, calls)
    yield from text.skip("</tool_call>")


def _llama(text: Text, calls: Calls) -> Steps[None]:
    """``{"name": ..., "parameters": {...}}; ...``"""
    while True:
        yield from text.space()
        yield from _object(text, calls)
        if not (yield from text.skip(";")):
            return


def _mistral(text: Text, calls: Calls) -> Steps[None]:
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or newer
    ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""
    yield from text.space()
    if (yield from text.peek()) == "[":
        more = yield from text.open("[", "]")
        if not more:
            raise Malformed
        while more:
            yield from _object(text, calls)
            more = yield from text.next_item("]")
        return
    head, _ = yield from text.until(["{"], MOST_HEAD)
    text.at -= 1
    name = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*", head)
    if not name:
        raise Malformed
    calls.begin(name[1])
    yield from calls.stream(text.value())
    calls.done()


def _deepseek(text: Text, calls: Calls) -> Steps[None]:
    """``function<｜tool▁sep｜>name`` and a JSON code block, or from V3.1 on
    ``name<｜tool▁sep｜>{...}``, each between marks."""  # noqa: RUF002
    if not (yield from text.skip(_CALL_BEGIN)):
        raise Malformed
    while True:
        name, _ = yield from text.until([_SEP], MOST_HEAD)
        fenced = name.strip() == "function" and (yield from text.peek()) != "{"
        if fenced:
            name, _ = yield from text.until(["\n```json\n"], MOST_HEAD)
        yield from text.space()
        if (yield from text.peek()) != "{":
            raise Malformed
        calls.begin(name.strip())
        yield from calls.stream(text.value())
        calls.done()
        if fenced:
            yield from text.skip("```")
        yield from text.skip(_CALL_END)
        if not (yield from text.skip(_CALL_BEGIN)):
            break
    yield from text.skip(_CALLS_END)


_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_SEP = "<｜tool▁sep｜>"  # noqa: RUF001


def _qwen_coder(text: Text, calls: Calls) -> Steps[None]:
    """``<function=name><parameter=key>value</parameter>...</function>``"""
    begun = text.buffer.endswith("<function=", 0, text.at)  # some models leave the outer mark out
    if not (begun or (yield from text.skip("<function="))):
        raise Malformed
    name, _ = yield from text.until([">"], MOST_HEAD)
    calls.begin(name)
    types = calls.tools[name].get("properties")
    lead = "{"
    while (yield from text.skip("<parameter=")):
        key, _ = yield from text.until([">"], MOST_HEAD)
        written, _ = yield from text.until(["</parameter>"])
        value = written.removeprefix("\n").removesuffix("\n")
        schema = types.get(key) if type(types) is dict else None
        calls.piece(f"{lead}{json.dumps(key)}: {_typed(value, schema)}")
        lead = ", "
    yield from text.space()
    yield from text.expect("</function>")
    calls.piece("}" if lead == ", " else "{}")
    calls.done()
    yield from text.skip("</tool_call>")


def _typed(value: str, schema: Any) -> str:
    """``value`` as JSON: as it is where the schema allows that, else as a string."""
    types = _types(schema)
    if not types or types == {"string"} or ("string" in types and value != "null"):
        return json.dumps(value, ensure_ascii=False)
    lowered = value.strip().lower()
    written = lowered if lowered in ("true", "false") else value.strip()
    text = Text()
    text.buffer, text.ended = written, True
    try:
        for _ in text.value():
            pass
    except Malformed:
        return json.dumps(value, ensure_ascii=False)
    return written if not text.rest else json.dumps(value, ensure_ascii=False)


def _types(schema: Any) -> set[str]:
    """The names of the types that a schema allows; empty: it does not say."""
    if type(schema) is not dict:
        return set()
    said = schema.get("type")
    found = {one for one in (said if type(said) is list else [said]) if type(one) is str}
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for one in options if type(options) is list else ():
            found |= _types(one)
    return found


def _pythonic(text: Text, calls: Calls) -> Steps[None]:
    """``[name(key=value), ...]``, with literals of Python or JSON."""
    yield from text.space()
    begin = text.at
    yield from text.expect("[")
    closing = ["]"]
    while closing:
        yield from text.run(_NO_BRACKET)
        letter = yield from text.peek()
        text.at += len(letter)
        if letter in _BRACKETS:
            closing.append(_BRACKETS[letter])
        elif letter in ("'", '"'):
            yield from _skip_string(text, letter)
        elif letter != closing.pop():
            raise Malformed
    found = _parsed(text.buffer[begin : text.at])
    if not calls.tools.keys() >= {name for name, _ in found} or len(found) > 1 > calls.several:
        raise Malformed  # all of them are content: the first would leave a list that is none
    for name, arguments in found:
        calls.begin(name)
        calls.piece(arguments)
        calls.done()
    yield from text.skip("<|python_end|>")


_NO_BRACKET = re.compile(r"[^()\[\]{}'\"]*")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def _skip_string(text: Text, quote: str) -> Steps[None]:
    while True:
        _, found = yield from text.until([quote, "\\"])
        if found == quote:
            return
        if not (yield from text.peek()):
            raise Malformed
        text.at += 1


def _parsed(source: str) -> list[tuple[str, str]]:
    """The calls in a list of them in Python: names and arguments as JSON."""
    found = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes
            tree = ast.parse(source, mode="eval").body
        for call in tree.elts:  # type: ignore[attr-defined]
            if call.args or any(key.arg is None for key in call.keywords):
                raise Malformed
            values = {key.arg: _literal(key.value) for key in call.keywords}
            arguments = json.dumps(values, ensure_ascii=False, allow_nan=False)
            arguments.encode()
            found.append((ast.unparse(call.func), arguments))
    except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        raise Malformed from None
    if not found:
        raise Malformed
    return found


class _JsonNames(ast.NodeTransformer):
    """The names of JSON's constants as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonNames().visit(node))


FORMATS = (
    Format(
        names=("qwen3_coder",),
        signs=("<tool_call>", "<function="),
        marks=("<tool_call>", "<function="),
        inner=("</tool_call>",),
        read=_qwen_coder,
    ),
    Format(
        names=("hermes", "qwen", "qwen25"),
        signs=("<tool_call>",),
        marks=("<tool_call>",),
        inner=("</tool_call>",),
        read=_hermes,
        frame=Frame('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
    ),
    Format(
        names=("mistral",),
        signs=("[TOOL_CALLS]",),
        marks=("[TOOL_CALLS]",),
        inner=("[ARGS]", "[CALL_ID]"),
        read=_mistral,
        frame=Frame('{"name": "%s", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
        id_prefix="",
        id_digits=9,
    ),
    Format(
        names=("deepseek_v3", "deepseekv3"),
        signs=(_CALLS_BEGIN, "```json"),
        marks=(_CALLS_BEGIN,),
        inner=(_CALL_BEGIN, _SEP, _CALL_END, _CALLS_END),
        read=_deepseek,
        frame=Frame(
            f"{_CALL_BEGIN}function{_SEP}%s\n```json\n", f"\n```{_CALL_END}", "\n",
            _CALLS_BEGIN, _CALLS_END,
        ),
    ),
    Format(
        names=("deepseek_v31", "deepseekv31"),
        signs=(_CALLS_BEGIN,),
        marks=(_CALLS_BEGIN,),
        inner=(_CALL_BEGIN, _SEP, _CALL_END, _CALLS_END),
        read=_deepseek,
        frame=Frame(f"{_CALL_BEGIN}%s{_SEP}", _CALL_END, "", _CALLS_BEGIN, _CALLS_END),
    ),
    Format(
        names=("pythonic",),
        signs=("[func_name1(",),
        marks=("<|python_start|>",),
        inner=("<|python_end|>",),
        read=_pythonic,
        first="[",
    ),
    Format(
        names=("llama3_json", "llama3"),
        signs=('{"name": function name, "parameters":',),
        marks=("<|python_tag|>",),
        read=_llama,
        first="{",
        frame=Frame('{"name": "%s", "parameters": ', "}", "; "),
    ),
)  # fmt: skip
"""The first whose signs a chat template has is its format."""

BY_NAME = {name: one for one in FORMATS for name in one.names}

JSON = BY_NAME["llama3_json"]
"""For models whose format has no frame, or that have none."""


def format_of(name: str, template: str) -> Format | None:
    """The format of this name, "auto": the one that ``template`` shows; None: there is none."""
    if name == "auto":
        return next((one for one in FORMATS if all(s in template for s in one.signs)), None)
    return BY_NAME.get(name)
