"""Drafts that are language models of their own, with every kind of state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_runner import Bench, prompt
from tiny_models import KINDS, PAGE, save_target

from kvkeep.models.drafts.loading import load_draft
from kvkeep.models.target.hf import load_target
from kvkeep.models.target.model import Target
from kvkeep.schema import UnsupportedModel

torch.set_num_threads(1)
GROUPS = {
    "mistral": {"draft_window": 1},
    "gemma2": {"draft": None, "draft_window": 1},
    "deepseek-v2": {"draft": None},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(save_target(tmp_path_factory.mktemp("models") / "target", "Llama"))


@pytest.mark.parametrize("family", GROUPS)
def test_chains_are_what_the_draft_would_say(family: str, target: Target, tmp_path: Path) -> None:
    import transformers

    name, options = KINDS[family]
    directory = save_target(tmp_path, name, **options)
    draft = load_draft(directory, target)
    plain = transformers.AutoModelForCausalLM.from_pretrained(  # others leave out soft-capping
        directory, attn_implementation="eager"
    )
    assert {group.name: group.tail for group in draft.groups(PAGE)} == GROUPS[family]
    bench = Bench(target, draft)
    seqs = [bench.sequence(prompt(n), report_proposals=True) for n in (5, 33)]
    bench.run(seqs, chunk=17)
    for seq in seqs:
        text, at = seq.tokens.tolist(), seq.prompt_length + 1
        for chain in seq.proposals:
            with torch.no_grad():
                logits = plain(torch.tensor([text[:at] + chain[:-1]])).logits[0]
            assert chain == logits[at - 1 :].argmax(-1).tolist()
            at += next((i for i, t in enumerate(chain) if t != text[at + i]), len(chain)) + 1


def test_recurrent_layers_are_refused(target: Target, tmp_path: Path) -> None:
    name, options = KINDS["lfm2"]
    with pytest.raises(UnsupportedModel, match="recurrent layers"):
        load_draft(save_target(tmp_path, name, **options), target)
