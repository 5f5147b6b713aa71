"""Every kind of state through the real cache: three tiers, a hit in the middle, a full device."""

from __future__ import annotations

from pathlib import Path

import pytest
from rig import Pair, Rig, prompt, save_tokenizer
from tiny_models import KINDS, save_draft, save_target

PAGE, PROMPT = 8, prompt(100)
HIT = 96  # tokens of whole pages, one token left to compute


@pytest.fixture(scope="module", params=["gemma3", "mistral", "deepseek-v3", "qwen3-next"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root: Path = tmp_path_factory.mktemp(request.param)
    family, options = KINDS[request.param]
    pair = Pair(save_target(root / "target", family, **options), save_draft(root / "draft"))
    save_tokenizer(pair.target)
    return pair


def test_a_prefix_comes_back_from_every_tier(pair: Pair, tmp_path: Path) -> None:
    options = {"page_size": PAGE, "storage_dir": tmp_path}
    with Rig(pair, **options) as rig:
        cold = rig.ask(PROMPT, 24)
        found = [("device", rig.ask(PROMPT, 24))]
        rig.evict("device")
        found.append(("host", rig.ask(PROMPT, 24)))
        rig.check_idle()
    with Rig(pair, **options) as rig:
        found.append(("storage", rig.ask(PROMPT, 24)))
        rig.check_idle()
    for tier, answer in found:
        assert answer.cached == {"device": 0, "host": 0, "storage": 0} | {tier: HIT}
        assert answer.tokens == cold.tokens
        assert answer.proposals == cold.proposals


def test_a_full_device_changes_no_token(pair: Pair) -> None:
    prompts = [PROMPT[: 30 + 7 * i] + prompt(20, seed=i) for i in range(6)]
    with Rig(pair, page_size=PAGE) as rig:
        expected = [rig.ask(one, 48).tokens for one in prompts]
    with Rig(pair, page_size=PAGE, device_tokens=256, host_bytes=1 << 22) as rig:
        answers = rig.run(*[rig.send(one, 48) for one in prompts])
        assert [answer.tokens for answer in answers] == expected
        assert rig.figure("preemptions_total") > 0
        rig.check_idle()
