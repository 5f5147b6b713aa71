"""The engine's greedy tokens equal those of ``transformers.generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rig import DEMO_PAIR, Pair, Rig, demo_prompts, prompt

NEW = 40
LENGTHS = (1, 5, 16, 17, 40, 64, 100, 33)
PROMPTS = [prompt(n) for n in LENGTHS]
ALONE = (0, 3, 6)  # prompts that are also served alone


class Reference:
    """The same weights, run by transformers alone."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, pad_token_id=0
        )

    def generate(self, tokens: list[int], new: int = NEW) -> list[int]:
        out = self._model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens)),
            max_new_tokens=new,
        )
        found: list[int] = out[0, len(tokens) :].tolist()
        return found

    @torch.no_grad()
    def gaps(self, tokens: list[int], start: int) -> list[float]:
        """Difference of the two best logits at each position from ``start`` on."""
        logits = self._model(torch.tensor([tokens])).logits[0, start - 1 : -1].float()
        top = logits.topk(2).values
        return (top[:, 0] - top[:, 1]).tolist()


@pytest.fixture(scope="module")
def expected(tiny: Pair) -> list[list[int]]:
    reference = Reference(tiny.target)
    outputs = [reference.generate(tokens) for tokens in PROMPTS]
    assert len({token for one in outputs for token in one}) > 24  # outputs vary
    return outputs


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("chunk", [17, 512])
def test_alone_and_together(draft: bool, chunk: int, tiny: Pair, expected: list[list[int]]) -> None:
    with Rig(tiny, draft=draft, chunked_prefill_size=chunk) as rig:
        for i in ALONE:
            assert rig.ask(PROMPTS[i], NEW).tokens == expected[i]
        rig.evict("device", "host")
        together = rig.run(*[rig.send(tokens, NEW) for tokens in PROMPTS])
        assert [answer.tokens for answer in together] == expected
        assert all((a.finished.usage.verify_steps > 0) == draft for a in together)
        rig.check_idle()


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("options", [{}, {"host_bytes": 0}], ids=["host", "no-host"])
def test_with_preemptions(
    draft: bool, options: dict[str, Any], tiny: Pair, expected: list[list[int]]
) -> None:
    with Rig(tiny, draft=draft, device_tokens=192, chunked_prefill_size=32, **options) as rig:
        names = [rig.send(tokens, NEW) for tokens in PROMPTS]
        assert [answer.tokens for answer in rig.run(*names)] == expected
        assert rig.figure("preemptions_total") > 0
        rig.check_idle()


def test_the_demo_pair() -> None:
    prompts = [demo_prompts()[period][3][:500] for period in ("period-64", "period-200")]
    reference = Reference(DEMO_PAIR.target)
    outputs = [reference.generate(tokens) for tokens in prompts]
    with Rig(DEMO_PAIR, page_size=64, device_tokens=4096, num_steps=7) as rig:
        answers = rig.run(*[rig.send(tokens, NEW) for tokens in prompts])
        assert [answer.tokens for answer in answers] == outputs
        assert all((answer.finished.usage.accept_length or 0) >= 4 for answer in answers)


@pytest.mark.parametrize("draft", [False, True])
def test_half_precision(draft: bool, tiny: Pair) -> None:
    """Tokens are equal up to the first position where rounding may change the choice."""
    reference = Reference(tiny.target, torch.bfloat16)
    compared = 0
    with Rig(tiny, draft=draft, dtype="bfloat16") as rig:
        answers = rig.run(*[rig.send(tokens, NEW) for tokens in PROMPTS])
    for tokens, answer in zip(PROMPTS, answers, strict=True):
        output = reference.generate(tokens)
        gaps = reference.gaps([*tokens, *output], len(tokens))
        sure = next((i for i, gap in enumerate(gaps) if gap < 0.02), NEW)
        assert answer.tokens[:sure] == output[:sure]
        compared += sure
    assert compared > 100
