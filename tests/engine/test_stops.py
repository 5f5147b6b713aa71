"""Stop conditions: what ends a request, what text it returns, what it leaves in the cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rig import Answer, Pair, Rig, prompt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvkeep.engine.request import RequestState
from kvkeep.engine.text import Detokenizer

NEW = 40
TOKENS = prompt(50)


@pytest.fixture
def rig(tiny: Pair) -> Any:
    with Rig(tiny, page_size=4) as rig:
        yield rig
        rig.check_idle()


@pytest.fixture(scope="module")
def free(tiny: Pair) -> Answer:
    """The answer without any stop condition."""
    with Rig(tiny) as rig:
        return rig.ask(TOKENS, NEW)


class PerfectDraft:
    """Replaces the engine's draft; proposes the tokens of ``text``, so that all are accepted."""

    def __init__(self, rig: Rig, text: list[int]) -> None:
        speculator = rig.engine._runner._speculator
        assert speculator is not None
        self._inner, self._text = speculator._draft, text
        speculator._draft = self  # type: ignore[assignment]
        rig.on_output = self._look
        self._at = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _look(self, seq: RequestState) -> None:
        self._at = seq.length

    def propose(self, hidden: Any) -> Any:
        tokens = self._inner.propose(hidden)
        tokens[:] = self._text[self._at]
        self._at += 1
        return tokens


def committed(rig: Rig) -> list[list[int]]:
    """Token runs in the tree, from the root to each leaf."""
    runs = []
    for _, node in rig.engine.cache.residency.tree.walk():
        if not node.kids:
            raw, above = bytes(node.raw), node.parent
            while above is not None:
                raw, above = bytes(above.raw) + raw, above.parent
            runs.append(np.frombuffer(raw, dtype="<i4").tolist())
    return runs


@pytest.mark.parametrize("at", [1, 7, 8, 9, 10, 11, 23])
def test_tokens_after_a_stop_are_not_kept(at: int, rig: Rig, free: Answer, tiny: Pair) -> None:
    """The stop token is among accepted proposals; those after it leave nothing in the cache."""
    text = [*TOKENS, *free.tokens]
    PerfectDraft(rig, text)
    end = free.tokens[at]
    at = free.tokens.index(end)
    answer = rig.ask(TOKENS, NEW, stop_token_ids=(end,))
    assert answer.tokens == free.tokens[: at + 1]
    assert answer.finished.reason == "stop"
    usage = answer.finished.usage
    assert usage.completion_tokens == at + 1
    assert usage.verify_steps <= -(-at // 5)  # whole chains were accepted
    kept = text[: len(TOKENS) + at + 1]
    (run,) = committed(rig)
    assert run == kept[: len(run)]
    assert len(run) >= (len(kept) - 1) // 4 * 4
    assert rig.ask([*kept, 5], 4).cached["device"] == len(run)  # and the kept pages are correct:
    with Rig(tiny, draft=False) as cold:
        assert rig.ask([*kept, 5], 8).tokens == cold.ask([*kept, 5], 8).tokens


def test_eos(rig: Rig, free: Answer) -> None:
    end = free.tokens[12]
    rig.engine._target.eos_ids = frozenset({end})
    cut = free.tokens.index(end) + 1
    answer = rig.ask(TOKENS, NEW, ignore_eos=False)
    assert answer.tokens == free.tokens[:cut]
    assert answer.finished.reason == "stop"
    assert rig.ask(TOKENS, NEW, ignore_eos=True).tokens == free.tokens


def test_a_stop_token_is_not_part_of_the_text(rig: Rig, free: Answer) -> None:
    ends = [i for i, token in enumerate(free.tokens) if 3 <= token < 98]
    at = next(i for i in ends[3:] if free.tokens[i] not in free.tokens[:i])
    whole = rig.ask(TOKENS, at).text
    answer = rig.ask(TOKENS, NEW, stop_token_ids=(free.tokens[at],))
    assert len(answer.tokens) == at + 1
    assert answer.text == whole


def test_stop_strings_across_tokens(rig: Rig, free: Answer) -> None:
    """Each letter is one token here, so a longer string spans several tokens."""
    whole = free.text
    letters = [i for i in range(6, len(whole) - 3) if whole[i : i + 3].isascii()]
    stop = whole[letters[0] : letters[0] + 3]
    at = whole.index(stop)
    answer = rig.ask(TOKENS, NEW, stop=("never in it", stop, stop + "x"))
    assert answer.text == whole[:at]
    assert answer.finished.reason == "stop"
    assert answer.tokens == free.tokens[: len(answer.tokens)]
    assert len(answer.tokens) < NEW
    (run,) = committed(rig)
    assert run == [*TOKENS, *answer.tokens][: len(run)]
    almost = rig.ask(TOKENS, NEW, stop=(whole[-2:] + "never in it",))
    assert almost.text == whole  # the held-back text was released at the end
    assert almost.finished.reason == "length"


def test_the_engine_decodes_only_requests_with_stop_strings(rig: Rig) -> None:
    plain, stopping = rig.send(TOKENS), rig.send(TOKENS, stop=("x",), stop_token_ids=(1,))
    rig.engine.turn()
    decoders = {name: decoder for name, (_, decoder) in rig.engine._sequences.items()}
    assert decoders[plain] is None
    assert isinstance(decoders[stopping], Detokenizer)
    rig.run()


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("new", [1, 2, 5, 6])
def test_length(new: int, speculate: bool, rig: Rig, free: Answer) -> None:
    answer = rig.ask(TOKENS, new, speculate=speculate)
    assert answer.tokens == free.tokens[:new]
    assert answer.finished.reason == "length"
    assert rig.ask(TOKENS, new, speculate=speculate).tokens == free.tokens[:new]  # from a hit


def test_sampling_does_not_depend_on_drafts_or_preemptions(tiny: Pair) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
    prompts = [prompt(n) for n in (1, 5, 16, 17, 40, 64, 100, 33)]
    outputs = []
    for draft, device in ((True, 4096), (False, 4096), (True, 192), (False, 192)):
        with Rig(tiny, draft=draft, device_tokens=device, chunked_prefill_size=32) as rig:
            names = [rig.send(p, NEW, seed=i, **options) for i, p in enumerate(prompts)]
            outputs.append([answer.tokens for answer in rig.run(*names)])
            assert (rig.figure("preemptions_total") > 0) == (device == 192)
            rig.check_idle()
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]


def test_requests_without_a_seed_differ(tiny: Pair) -> None:
    outputs = []
    for _ in range(2):
        with Rig(tiny, seed=3) as rig:
            names = [rig.send(TOKENS, 8, temperature=1.0) for _ in range(3)]
            outputs.append([answer.tokens for answer in rig.run(*names)])
    assert outputs[0] == outputs[1]  # the engine's seed determines them
    assert len({tuple(tokens) for tokens in outputs[0]}) == 3


# -- the detokenizer alone


@pytest.fixture(scope="module")
def byte_fallback(tiny: Pair) -> Tokenizer:
    return Tokenizer.from_file(str(tiny.target / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def push(tokenizer: Tokenizer, pieces: Sequence[Sequence[int]], *stop: str) -> list[str]:
    """Text that each piece releases, and at the end what was held back."""
    detokenizer = Detokenizer(tokenizer, stop)
    return [*(detokenizer.push(piece)[0] for piece in pieces), detokenizer.flush()]


def test_characters_of_several_tokens(byte_level: Tokenizer) -> None:
    text = "a€😀é!"
    ids = byte_level.encode(text).ids
    assert len(ids) == 11
    pieces = push(byte_level, [[i] for i in ids])
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert pieces[:4] == ["a", "", "", "€"]


def test_a_stop_string_of_several_characters_of_several_tokens(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ab€😀cd").ids
    for size in (1, 2, 3, 20):
        detokenizer = Detokenizer(byte_level, ["€😀"])
        text, count = "", None
        for start in range(0, len(ids), size):
            more, count = detokenizer.push(ids[start : start + size])
            text += more
            if count is not None:
                break
        assert text == "ab"
        assert count is not None
        assert start + count == 9  # a, b and the 7 bytes of the stop string


def test_text_is_held_back_no_longer_than_needed(byte_level: Tokenizer) -> None:
    ids = [[i] for i in byte_level.encode("xabxabc").ids]
    assert push(byte_level, ids, "abd") == ["x", "", "", "abx", "", "", "abc", ""]
    assert push(byte_level, ids[:-1], "abd") == ["x", "", "", "abx", "", "", "ab"]


def test_random_bytes_raise_no_error(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer, low, high in ((byte_level, 0, 256), (byte_fallback, 90, 128)):
        for seed in range(200):
            dice = random.Random(seed)
            ids = [dice.randrange(low, high) for _ in range(50)]
            detokenizer = Detokenizer(tokenizer, ["€"])
            for token in ids:
                detokenizer.push([token])


def test_invalid_bytes_lose_no_letters(byte_fallback: Tokenizer) -> None:
    euro = [byte_fallback.token_to_id(f"<0x{b:02X}>") for b in "€".encode()]
    letter = byte_fallback.token_to_id
    ids = [letter("a"), *euro, euro[1], letter("b"), letter("c")]
    text = "".join(push(byte_fallback, [[i] for i in ids]))
    assert text.startswith("a€")
    assert text.endswith("bc")
