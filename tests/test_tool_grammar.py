"""kvkeep.server.tool_grammar: what an answer must match, with tools and reasoning."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

import kvkeep.demo
from kvkeep.engine.grammar import _COMPILERS
from kvkeep.engine.text import Detokenizer
from kvkeep.models.tokenizer import load_tokenizer
from kvkeep.server.dialects import Dialects, Plan
from kvkeep.server.protocol import ChatRequest
from kvkeep.server.speech import Speech
from kvkeep.server.tool_formats import FORMATS

DEMO = Path(kvkeep.demo.__file__).parent / "pair/target"
SCHEMA = {
    "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
    "additionalProperties": False,
}  # fmt: skip
GET: dict[str, Any] = {"function": {"name": "get", "parameters": SCHEMA}}
STRICT: dict[str, Any] = {"function": {**GET["function"], "strict": True}}
NOW: dict[str, Any] = {"function": {"name": "now"}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "tools": [GET, NOW]}
FRAMED = [form for form in FORMATS if form.frame]
SPECIAL = ["[TOOL_CALLS]", "<|python_tag|>", "[THINK]", "[/THINK]"]


@cache
def tokenizer() -> Any:
    """The demo's, with special tokens of other families."""
    loaded = load_tokenizer(DEMO)
    loaded.add_special_tokens({"additional_special_tokens": SPECIAL})
    return loaded


@cache
def prepared() -> Any:
    return from_tokenizer(tokenizer())


def plan(name: str, ending: str = "", reasoning: str = "none", **fields: Any) -> Plan:
    body = ChatRequest.model_validate(ASK | fields)
    return Dialects(tokenizer(), name, reasoning).plan(body, ending)


def state(plan: Plan, text: str) -> str:
    """Whether ``text`` is "refused", a "part" of an answer, or "whole"."""
    assert plan.grammar
    matcher = LLMatcher(prepared(), _COMPILERS[plan.grammar.kind](plan.grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer().encode(text, add_special_tokens=False)
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return "refused"
    return "whole" if matcher.is_accepting() else "part"


def written(form: Any, *calls: tuple[str, str]) -> str:
    frame = form.frame
    inner = frame.between.join(frame.before % name + args + frame.after for name, args in calls)
    return f"{frame.opening}{inner}{frame.closing}"


NAMES = [form.names[0] for form in FRAMED]


@pytest.mark.parametrize("form", FRAMED, ids=NAMES)
class TestForced:
    def test_calls_and_nothing_else(self, form: Any) -> None:
        needed = plan(form.names[0], tool_choice="required")
        one = written(form, ("get", '{"x": 1}'))
        two = written(form, ("get", '{"x": 1}'), ("now", "{}"))
        assert state(needed, one) == state(needed, two) == "whole"
        others = [written(form, call) for call in (("got", "{}"), ("get", "{}"), ("now", "1"))]
        for wrong in ("Sure", f"a{one}", one + "a", one[:-1] + "\t", *others):
            assert state(needed, wrong) == "refused"
        assert state(needed, "") == "part"

    def test_one_call_only(self, form: Any) -> None:
        one, two = written(form, ("now", "{}")), written(form, ("now", "{}"), ("now", "{}"))
        named = {"type": "function", "function": {"name": "now"}}
        for fields in (
            {"tool_choice": named},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ):
            single = plan(form.names[0], **fields)
            assert (state(single, one), state(single, two)) == ("whole", "refused")
        assert (
            state(plan(form.names[0], tool_choice=named), written(form, ("get", "{"))) == "refused"
        )

    def test_the_parser_reads_what_the_grammar_lets_through(self, form: Any) -> None:
        needed = plan(form.names[0], tool_choice="required")
        speech = Speech(needed.dialect)
        parts = speech.push(written(form, ("get", '{"x": 1}'), ("now", "{}"))) + speech.finish()
        assert speech.calls == 2
        assert {part.kind for part in parts} == {"name", "arguments"}

    def test_strict_only_where_there_is_a_call(self, form: Any) -> None:
        free = plan(form.names[0], tools=[STRICT, NOW])
        good, bad = (written(form, ("get", f'{{"x": {value}}}')) for value in ("1", '"a"'))
        assert state(free, "Sure, I do. {") == "whole"
        assert state(free, "") == state(free, good) == "whole"
        assert state(free, bad) == "refused"
        assert state(free, written(form, ("now", '{"any": 1}'))) == "whole"
        if form.first is None:
            assert state(free, f"Sure.\n{good}") == "whole"
            assert state(free, f"Sure.\n{bad}") == "refused"
            assert state(free, f"Sure.\n{good}\n{bad}") == "refused"

    def test_a_format_or_calls(self, form: Any) -> None:
        either = plan(form.names[0], regex="[a-c]+/\n?")
        assert state(either, "abc/") == state(either, written(form, ("now", "{}"))) == "whole"
        assert state(either, "abd") == "refused"


@pytest.mark.parametrize("name", ["none", "pythonic", "qwen3_coder"])
def test_formats_without_a_frame_write_json(name: str) -> None:
    needed = plan(name, tool_choice="required")
    calls = '{"name": "get", "parameters": {"x": 1}}; {"name": "now", "parameters": {}}'
    assert state(needed, calls) == "whole"
    assert state(needed, "[now()]") == "refused"
    assert plan(name, tools=[STRICT]).grammar is None


class TestReasoning:
    @pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
    def test_the_rest_matches(self, tags: tuple[str, str]) -> None:
        begin, end = tags
        kind = "think" if begin == "<think>" else "mistral"
        needed = plan("hermes", reasoning=kind, tool_choice="required")
        call = written(FRAMED[0], ("now", "{}"))
        for text, found in [
            (call, "whole"), (f"{begin}any\ntext{end}\n\n{call}", "whole"), ("any", "refused"),
            (f"{begin}any", "part"), (f"{begin}any{end}any", "refused"), (end, "refused"),
        ]:  # fmt: skip
            assert state(needed, text) == found
        opened = plan("hermes", f"...{begin}\n", kind, tool_choice="required")
        assert state(opened, f"any{end}{call}") == "whole"
        assert state(opened, call) == "part"
        closed = plan("hermes", f"{begin}{end}\n", kind, tool_choice="required")
        assert state(closed, "any") == "refused"
        assert closed.dialect.tags is None

    @pytest.mark.parametrize(
        ("fields", "good", "bad"),
        [
            ({"json_schema": SCHEMA}, '{"x": 1}', '{"x": "'),
            ({"response_format": {"type": "json_object"}}, '{"y": []}', "[]"),
            ({"regex": r"a\/b/c\\|\n"}, "a/b/c\\", "a/b/d"),
            ({"regex": "(x\ny)"}, "x\ny", "xy"),
        ],
    )
    def test_a_format(self, fields: dict[str, Any], good: str, bad: str) -> None:
        needed = plan("none", "<think>", "think", tools=[], **fields)
        assert state(needed, f"any</think>{good}") == "whole"
        assert state(needed, f"any</think>{bad}") == "refused"

    def test_a_schema_that_is_none(self) -> None:
        with pytest.raises(ValueError, match="json_schema is not valid JSON"):
            plan("none", "<think>", "think", tools=[], json_schema="{")


def test_special_tokens_of_calls_are_text() -> None:
    """Others are not."""
    ids = dict(zip(SPECIAL, tokenizer().convert_tokens_to_ids(SPECIAL), strict=True))
    spelled = plan("mistral", reasoning="mistral").spelled
    assert {*spelled} == {ids["[TOOL_CALLS]"], ids["[THINK]"], ids["[/THINK]"]}
    assert plan("hermes").spelled == plan("mistral", tools=[]).spelled == ()
    text = "a[TOOL_CALLS]b<|python_tag|>c"
    detokenizer = Detokenizer(tokenizer().backend_tokenizer, ["d"], spelled)
    assert detokenizer.push(tokenizer().encode(text, add_special_tokens=False))[0] == (
        re.sub(r"<.*>", "", text)
    )
