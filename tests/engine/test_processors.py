"""Greedy tokens under penalties, bias and grammars equal those of ``transformers.generate`` with
the same rules: with and without a draft, cold and from every tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from rig import DEMO_PAIR, Pair, Rig, demo_prompts
from torch import Tensor

from kvkeep.engine.grammar import _COMPILERS
from kvkeep.engine.messages import Failed, Grammar
from kvkeep.models.tokenizer import load_tokenizer

NEW = 28
PROMPT = 17 * demo_prompts()["period-64"][3][:19]  # so that answers repeat tokens, too
EOS = 1
LETTERS = Grammar("regex", r"[a-zA-Z ();:']{20,60}")
LIST = Grammar("json_schema", '{"type": "array", "items": {"enum": ["a", 7]}, "maxItems": 6}')

CALL = Grammar(
    "lark",
    "start: thought call\n"
    'thought[suffix="</think>"]: /(.|\\n){3,9}/\n'
    'call: "<tool_call>{" args "}"\n'
    'args: %json {"type": "array", "items": {"enum": ["a", 7]}, "maxItems": 6}',
)

Processor = Callable[[Tensor, Tensor], Tensor]


def openai_penalties(frequency: float, presence: float) -> Processor:
    """As in OpenAI's documentation, on what was generated."""

    def process(tokens: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(tokens[0, len(PROMPT) :], minlength=scores.shape[-1])
        return scores - frequency * counts - presence * (counts > 0)

    return process


def follow(grammar: Grammar) -> Processor:
    """The grammar's mask after each token, from the beginning each time."""
    tokenizer = from_tokenizer(load_tokenizer(DEMO_PAIR.target), n_vocab=2048)
    compiled = _COMPILERS[grammar.kind](grammar.text)

    def process(tokens: Tensor, scores: Tensor) -> Tensor:
        matcher = LLMatcher(tokenizer, compiled)
        assert matcher.consume_tokens(tokens[0, len(PROMPT) :].tolist())
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[-1]].astype(bool)
        return scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)

    return process


class Case(NamedTuple):
    """The same rules for both sides."""

    ours: dict[str, Any]  # of Sampling
    theirs: dict[str, Any]  # of generate
    processors: Sequence[Callable[[], Processor]] = ()


def biases(token: int, bias: float) -> list[list[Any]]:
    return [[[token], bias]]


CASES = {
    "none": Case({}, {}),
    "repetition": Case({"repetition_penalty": 4.0}, {"repetition_penalty": 4.0}),
    "openai": Case(
        {"repetition_penalty": 4.0, "frequency_penalty": -1.7, "presence_penalty": -1.9},
        {"repetition_penalty": 4.0},
        [lambda: openai_penalties(-1.7, -1.9)],
    ),
    "bias": Case({"logit_bias": {300: 9.0}}, {"sequence_bias": biases(300, 9.0)}),
    "min_tokens": Case(
        {"logit_bias": {EOS: 90.0}, "min_tokens": 11, "ignore_eos": False},
        {"sequence_bias": biases(EOS, 90.0), "min_new_tokens": 11},
    ),
    "regex": Case({"grammar": LETTERS, "ignore_eos": False}, {}, [lambda: follow(LETTERS)]),
    "json": Case({"grammar": LIST, "ignore_eos": False}, {}, [lambda: follow(LIST)]),
    "call": Case({"grammar": CALL, "ignore_eos": False}, {}, [lambda: follow(CALL)]),
    "together": Case(
        {"repetition_penalty": 4.0, "presence_penalty": 0.5, "logit_bias": {300: 3.0}}
        | {"grammar": LETTERS, "ignore_eos": False},
        {"repetition_penalty": 4.0, "sequence_bias": biases(300, 3.0)},
        [lambda: openai_penalties(0.0, 0.5), lambda: follow(LETTERS)],
    ),
}


@cache
def reference() -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_PAIR.target, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, pad_token_id=0, eos_token_id=EOS
    )
    return model


@cache
def generate(name: str) -> Any:
    """What transformers generates, with the model's logits in each place."""
    case = CASES[name]
    eos = {} if case.ours.get("ignore_eos", True) is False else {"eos_token_id": None}
    return reference().generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT)),
        max_new_tokens=NEW,
        logits_processor=transformers.LogitsProcessorList(make() for make in case.processors),
        return_dict_in_generate=True,
        output_logits=True,
        **case.theirs,
        **eos,
    )


def tokens_of(name: str) -> list[int]:
    found: list[int] = generate(name).sequences[0, len(PROMPT) :].tolist()
    return found


def from_each_tier(rig: Rig, **ours: Any) -> Iterator[tuple[str, Any]]:
    """The answer cold and from each tier, by where its prefix hit came from."""
    for tier, gone in {
        "": (), "device": (), "host": ("device",), "storage": ("device", "host"),
    }.items():  # fmt: skip
        rig.evict(*gone)
        answer = rig.ask(PROMPT, NEW, **ours)
        assert [name for name, tokens in answer.cached.items() if tokens] == [tier] * bool(tier)
        assert answer.hit == sum(answer.cached.values())
        yield tier, answer


@pytest.mark.parametrize("draft", [False, True], ids=["alone", "draft"])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"none"}))
def test_rules_act_on_every_position(name: str, draft: bool, tmp_path: Path) -> None:
    case, tokens = CASES[name], tokens_of(name)
    for other in {"none", "repetition"} - {name}:
        assert tokens != tokens_of(other)[: len(tokens)], "the rule changes nothing"
    with Rig(DEMO_PAIR, draft=draft, storage_dir=tmp_path, num_steps=7) as rig:
        for tier, answer in from_each_tier(rig, **case.ours):
            assert answer.tokens == tokens, tier
            assert (answer.finished.usage.verify_steps > 0) == draft
        rig.check_idle()


@pytest.mark.parametrize("draft", [False, True], ids=["alone", "draft"])
def test_log_probabilities_are_those_of_the_model(draft: bool, tmp_path: Path) -> None:
    """Also where penalties change what is drawn."""
    expected = torch.stack(generate("repetition").logits)[:, 0].log_softmax(-1)
    with Rig(DEMO_PAIR, draft=draft, storage_dir=tmp_path, num_steps=7) as rig:
        for tier, answer in from_each_tier(rig, logprobs=3, **CASES["repetition"].ours):
            assert len(answer.logprobs) == len(answer.tokens) == NEW
            for row, token, found in zip(expected, answer.tokens, answer.logprobs, strict=True):
                assert found.logprob == pytest.approx(float(row[token]), abs=1e-4), tier
                best = row.topk(3)
                assert [i for i, _ in found.top] == best.indices.tolist()
                assert [p for _, p in found.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_log_probabilities_of_a_prompt() -> None:
    """Of all its tokens, though a hit could spare most of them."""
    with torch.no_grad():
        scores = reference()(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    expected = scores[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].tolist()
    with Rig(DEMO_PAIR, chunked_prefill_size=100) as rig:
        plain = rig.ask(PROMPT, 8)
        answer = rig.ask(PROMPT, 8, logprobs=1, prompt_logprobs=True)
        assert answer.tokens == plain.tokens
        assert not any(answer.cached.values())
        assert [one.logprob for one in answer.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
        again = rig.ask(PROMPT, 8)
        assert again.cached["device"]
        assert again.tokens == plain.tokens
        rig.check_idle()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", '{"type": "nothing"}'),
        Grammar("regex", "a(b"),
        Grammar("lark", "start: nowhere"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused(grammar: Grammar, tiny: Pair) -> None:
    with Rig(tiny) as rig:
        answer = rig.ask([5, 6], 4, grammar=grammar)
        assert isinstance(answer.end, Failed)
        assert answer.end.kind == "RequestError"
        assert grammar.kind in answer.end.message
        assert rig.ask([5, 6], 4).tokens


def test_json_has_little_space(tiny: Pair) -> None:
    """A model that prefers spaces cannot go on with them for ever."""
    schema = Grammar("json_schema", '{"type": "array", "items": {"enum": [7]}, "minItems": 1}')
    space = load_tokenizer(tiny.target).convert_tokens_to_ids(" ")
    with Rig(tiny) as rig:
        answer = rig.ask([5, 6], 100, grammar=schema, logit_bias={space: 100}, ignore_eos=False)
    assert 2 * 32 <= answer.text.count(" ") <= 4 * 32
    assert answer.text.replace(" ", "").startswith("[7")
