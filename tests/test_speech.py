"""kvkeep.server.speech and its formats: reasoning, content and tool calls in text."""

# ruff: noqa: RUF001 - marks of DeepSeek have wide bars

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.server.incremental import MOST_LEVELS, Malformed, Text
from kvkeep.server.speech import Dialect, Speech, tags_of
from kvkeep.server.tool_formats import BY_NAME, FORMATS, MOST_HEAD, format_of

TOOLS: dict[str, dict[str, Any]] = {
    "get": {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "m": {"type": ["string", "null"]},
            "odd": {"type": 7, "anyOf": 3},
        },
    },
    "now": {"type": "object", "properties": {}},
}
THINK = ("<think>", "</think>")


@dataclass
class Heard:
    """A whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)

    @property
    def parsed(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls.values()]


def listen(dialect: Dialect, pieces: Sequence[str]) -> Heard:
    speech, heard = Speech(dialect), Heard()
    parts = [part for piece in pieces for part in speech.push(piece)]
    for part in parts + speech.finish():
        match part.kind:
            case "content":
                heard.content += part.text
            case "reasoning":
                heard.reasoning += part.text
            case "name":
                heard.calls[part.call] = [part.text, ""]
            case "arguments":
                heard.calls[part.call][1] += part.text
            case "broken":
                del heard.calls[part.call]
    assert speech.calls == len(heard.calls)
    return heard


def dialect(name: str, **fields: Any) -> Dialect:
    return Dialect(BY_NAME[name], TOOLS, **fields)


V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"
V31_CALL = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"
GET, NOW = '{"x": 1, "s": "a\\"}]<b"}', "{}"
CODER_GET = '<function=get>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\na"}]<b\n</parameter>\n'
TWO = {  # two calls in each format: get(x=1, s='a"}]<b') and now()
    "hermes": (
        f'<tool_call>\n{{"name": "get", "arguments": {GET}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "now", "arguments": {NOW}}}\n</tool_call>'
    ),
    "llama3_json": (
        f'{{"name": "get", "parameters": {GET}}}; {{"type": "function", "name": "now"}}'
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "get", "arguments": {GET}}}, '
        f'{{"arguments": {NOW}, "name": "now", "id": "abcdefghi"}}]'
    ),
    "mistral-11": f"[TOOL_CALLS]get[ARGS]{GET}[TOOL_CALLS]now{NOW}",
    "deepseek_v3": (
        f"<｜tool▁calls▁begin｜>{V3_CALL % ('get', GET)}\n{V3_CALL % ('now', NOW)}"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜>{V31_CALL % ('get', GET)}{V31_CALL % ('now', NOW)}"
        "<｜tool▁calls▁end｜>"
    ),
    "qwen3_coder": (
        f"<tool_call>\n{CODER_GET}</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "pythonic": """[get(x=1, s='a"}]<b'), now()]""",
}
EXPECTED = [("get", {"x": 1, "s": 'a"}]<b'}), ("now", {})]


@pytest.mark.parametrize("name", TWO)
def test_two_calls(name: str) -> None:
    form = name.removesuffix("-11")
    heard = listen(dialect(form), [TWO[name]])
    assert heard.parsed == EXPECTED
    assert heard.content == ""
    assert listen(dialect(form), TWO[name]).calls == heard.calls  # letter by letter


@pytest.mark.parametrize("name", sorted(TWO.keys() - {"pythonic", "llama3_json"}))
def test_content_beside_calls(name: str) -> None:
    heard = listen(dialect(name.removesuffix("-11")), [f"I look. \n\n{TWO[name]}\n"])
    assert (heard.content, heard.parsed) == ("I look.", EXPECTED)


def test_every_format_is_tried() -> None:
    assert {BY_NAME[name.removesuffix("-11")] for name in TWO} == set(FORMATS)


@pytest.mark.parametrize("name", sorted({*BY_NAME}))
def test_one_call_only(name: str) -> None:
    """What follows is content; in one list it stays with the list."""
    (form,) = [x for x in TWO if BY_NAME.get(x) is BY_NAME[name]]
    heard = listen(dialect(name, several=False), [TWO[form]])
    assert heard.parsed == ([] if form == "pythonic" else EXPECTED[:1])
    assert "now" in heard.content


MARKED = [form for form in FORMATS if form.frame]
MALFORMED = [
    "%s", "%s{", '%s{"name": "get"', '%s{"name": "get", "arguments": [1]}', '%s{"name": 1}',
    '%s{"name": "unknown", "arguments": {}}', '%s{"name": "get", "arguments": {"x": 01}}',
    '%s{"name": "get", "arguments": {"x": 1}', '%s{"name": "get", "arguments": {"x": "a\nb"}}',
    '%s{"name": "get", "arguments": {"x": tru}}', '%s{"other": 1, "name": "get"}', "%s[]", "%sget",
    '%s{"name": "get", "arguments": {"x": "\\q"}}', '%s{"name": "get" "arguments": {}}',
    '%s{"arguments": {"x": 1}}', '%s{"name": "get", "arguments": {"x": 1,}}',
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED)
@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json"])
def test_malformed_calls_are_content(name: str, text: str) -> None:
    text = text % ("" if name == "llama3_json" else BY_NAME[name].marks[0])
    for pieces in ([text], text):
        assert listen(dialect(name), pieces) == Heard(content=text)
        after = [*pieces, "\n" + TWO["hermes"]]
        if name == "hermes":
            assert listen(dialect(name), after).parsed == EXPECTED


@pytest.mark.parametrize(
    "text",
    [
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>x",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>[]",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + "g" * (MOST_HEAD + 1) + "<｜tool▁sep｜>{}",
    ],
)  # fmt: skip
def test_malformed_calls_of_deepseek(text: str) -> None:
    for pieces in ([text], text):
        assert listen(dialect("deepseek_v3"), pieces) == Heard(content=text)


@pytest.mark.parametrize(
    "text",
    [
        "[", "[1, 2]", "[get(1)]", "[get(x=y)]", "[get(x=1)", "[get(x='a)]", "[f()]", "[]",
        "[get(x=1e999)]", "[get(x={1})]", "[get(x=" + "-" * 5000 + "1)]", "[get(x=(]))]",
        "[get()](", "[get(x='\\", "[get(**{})]", "[get(x=b'')]", "[a.get()]", "[now(), f()]",
        "[get(x='\\ud800')]",
    ],
)  # fmt: skip
def test_malformed_lists_of_python(text: str) -> None:
    for pieces in ([text], text):
        heard = listen(dialect("pythonic"), pieces)
        if text == "[get()](":
            assert (heard.content, heard.parsed) == ("(", [("get", {})])
        else:
            assert heard == Heard(content=text)


def test_values_of_python() -> None:
    text = "[get(a=-1, b=[True, None, false, null], c={'d': 'e'}, f=1.5, g='\\d')] done"
    heard = listen(dialect("pythonic"), [text])
    values = {"a": -1, "b": [True, None, False, None], "c": {"d": "e"}, "f": 1.5, "g": "\\d"}
    assert heard.parsed == [("get", values)]
    assert heard.content == " done"


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("x", "12", 12), ("x", "twelve", "twelve"), ("x", "1 2", "1 2"), ("x", "True", True),
        ("s", "12", "12"), ("s", "\n12\n", "\n12\n"), ("o", '{"a": [1]}', {"a": [1]}),
        ("o", "null", None), ("o", "{", "{"), ("m", "null", None), ("m", "7", "7"),
        ("odd", "7", "7"), ("unknown", "7", "7"), ("x", "", ""), ("s", "a\nb", "a\nb"),
    ],
)  # fmt: skip
def test_types_of_xml(key: str, written: str, value: Any) -> None:
    """By the schema; a value that does not fit it is a string."""
    text = f"<function=get><parameter={key}>\n{written}\n</parameter></function>"
    assert listen(dialect("qwen3_coder"), text).parsed == [("get", {key: value})]


@pytest.mark.parametrize(
    "text",
    ["<tool_call>x", "<function=get>", "<function=no></function>", "<tool_call><function=get>1",
     "<function=get><parameter=x>1</function>", "<function=get><parameter=x>1</parameter>x"],
)  # fmt: skip
def test_malformed_xml_is_content(text: str) -> None:
    assert listen(dialect("qwen3_coder"), text) == Heard(content=text)


def test_arguments_come_as_they_are_written() -> None:
    """A stream need not wait for the end of a call."""
    speech = Speech(dialect("hermes"))
    assert speech.push('<tool_call>{"name": "ge') == []
    name, first = speech.push('t", "arguments": {"x": [1, ')
    assert (name.kind, name.text, name.call) == ("name", "get", 0)
    assert (first.kind, first.text, first.call) == ("arguments", '{"x": [1, ', 0)
    assert [part.text for part in speech.push("2]}}</tool_call>a <too")] == ["2]}", "a"]
    assert [part.text for part in speech.push("t")] == [" <toot"]


def test_a_call_that_breaks_off_is_content_after_all() -> None:
    speech = Speech(dialect("hermes"))
    speech.push(text := '<tool_call>{"name": "get", "arguments": {"x": ')
    broken, *parts = speech.finish()
    assert (broken.kind, broken.call) == ("broken", 0)
    assert "".join(part.text for part in parts) == text
    assert speech.calls == 0


class TestReasoning:
    @pytest.mark.parametrize(
        ("text", "opened", "reasoning", "content"),
        [
            ("<think>\nhm\n\n</think>\n\nyes", False, "hm", "yes"),
            ("  <think>hm</think>yes ", False, "hm", "yes "),
            ("hm</think>yes", True, "hm", "yes"),
            ("hm", True, "hm", ""),
            ("\nhm </thin", True, "hm </thin", ""),
            ("yes <think>", False, "", "yes <think>"),
            (" yes</think>", False, "", " yes</think>"),
            ("<think></think>\n\n", False, "", ""),
            ("<thin", False, "", "<thin"),
            ("", False, "", ""),
        ],
    )
    def test_it_comes_first(self, text: str, opened: bool, reasoning: str, content: str) -> None:
        for pieces in ([text], text):
            heard = listen(Dialect(tags=THINK, opened=opened), pieces)
            assert (heard.reasoning, heard.content) == (reasoning, content)

    @pytest.mark.parametrize("opened", [False, True])
    def test_calls_in_it_are_none(self, opened: bool) -> None:
        text = "<think>" * (not opened) + f"{TWO['hermes']}</think>{TWO['hermes']}"
        heard = listen(dialect("hermes", tags=THINK, opened=opened), text)
        assert heard.reasoning == TWO["hermes"]
        assert heard.parsed == EXPECTED

    @pytest.mark.parametrize("opened", [False, True])
    def test_left_in_the_content(self, opened: bool) -> None:
        said = "<think>" * (not opened) + f"\n{TWO['hermes']}\n</think>\n\n"
        heard = listen(
            dialect("hermes", tags=THINK, opened=opened, separate=False), said + TWO["hermes"]
        )
        assert (heard.reasoning, heard.content) == ("", said.rstrip())
        assert heard.parsed == EXPECTED

    def test_calls_without_a_mark_come_after_it(self) -> None:
        text = f"hm</think>\n\n{TWO['llama3_json']}"
        heard = listen(dialect("llama3_json", tags=THINK, opened=True), text)
        assert (heard.reasoning, heard.parsed) == ("hm", EXPECTED)


WORDS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "get", ">", "</function>",
    "<parameter=x>", "</parameter>", "[TOOL_CALLS]", "[", "]", '{"name": "get", "arguments": ', "{",
    '"x": ', "1", '"s', '"', "}", ";", ",", " ", "\n", "<", "<tool", "é", "\\", "[ARGS]", "get(",
    ")", '{"name": "now"}', "x=", "'", '{"parameters": {}, "name": "now"}', "``", "<｜tool▁sep｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "\n```json\n",
    "function",
    *TWO.values(),
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=12).map("".join)


@st.composite
def cut(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=9)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@settings(max_examples=150)
@given(
    pieces=cut(),
    name=st.sampled_from(sorted(form.names[0] for form in FORMATS)),
    tags=st.sampled_from([None, THINK]),
    opened=st.booleans(),
    separate=st.booleans(),
    several=st.booleans(),
)
def test_cuts_change_nothing_and_nothing_is_lost(
    pieces: list[str], name: str, **fields: Any
) -> None:
    text, how = "".join(pieces), dialect(name, **fields)
    whole = listen(how, [text])
    assert listen(how, pieces) == whole
    assert listen(how, text) == whole
    assert all(call in TOOLS for call, _ in whole.parsed)
    if not whole.calls:
        tags = THINK if whole.reasoning or not whole.content.strip() else ()
        rest = text
        for tag in tags:
            rest = rest.replace(tag, "", 1)
        said = whole.reasoning + whole.content
        assert "".join(said.split()) in ("".join(text.split()), "".join(rest.split()))


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(value=VALUES, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_json_is_read_to_its_end(value: Any, indent: int | None, ascii_only: bool) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    text = Text()
    steps = text.value()
    for letter in written + " ":
        text.buffer += letter
        next(steps, None)
    assert text.at == len(written)


def test_json_may_not_be_too_deep() -> None:
    for levels in (MOST_LEVELS, MOST_LEVELS + 1):
        text = Text()
        text.buffer, text.ended = "[" * levels + "]" * levels, True
        if levels > MOST_LEVELS:
            with pytest.raises(Malformed):
                for _ in text.value():
                    pass
        else:
            for _ in text.value():
                pass


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json"),
        ("[func_name1(params_name1=params_value1...)]", "pythonic"),
    ],
)
def test_the_template_shows_the_format(template: str, name: str) -> None:
    assert format_of("auto", template) is BY_NAME[name]
    assert format_of("none", template) is None
    assert format_of("mistral", template) is BY_NAME["mistral"]
    assert format_of("auto", "plain") is None


def test_the_template_shows_the_tags() -> None:
    assert tags_of("auto", "... <think>\n ... </think>") == THINK
    assert tags_of("auto", "[THINK] [/THINK]") == ("[THINK]", "[/THINK]")
    assert tags_of("auto", "plain") is None
    assert tags_of("none", "</think>") is None
    assert tags_of("deepseek-r1", "plain") == THINK
