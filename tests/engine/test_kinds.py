"""Every kind of state through the real cache: three tiers, partial evictions, a full device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rig import Pair, Rig, prompt
from tiny_models import KINDS

PAGE, PROMPT, NEW, FEW = 8, prompt(100), 10, 6
HIT = 96  # tokens of whole pages, one token left to compute
CHUNKS = (17, 512, 5)  # 5: chunks that end within a page, and that cross into the next
CASES = [
    pytest.param(kind, CHUNKS[i % 3], i % 2 == 0, id=f"{kind}-{CHUNKS[i % 3]}")
    for i, kind in enumerate(KINDS)
]  # each kind with one chunk size, with or without draft; test_families has chunks of one token


@pytest.mark.parametrize(("kind", "chunk", "draft"), CASES)
def test_a_prefix_comes_back_from_every_tier(
    make_pair: Callable[[str], Pair], kind: str, chunk: int, draft: bool, tmp_path: Path
) -> None:
    pair = make_pair(kind)
    options = {
        "draft": draft,
        "page_size": PAGE,
        "chunked_prefill_size": chunk,
        "storage_dir": tmp_path / "storage",
    }
    batch = [PROMPT[: 30 + 9 * i] + prompt(5, seed=i) for i in range(0, 7, 2)]
    with Rig(pair, **options) as rig:
        cold = rig.ask(PROMPT, NEW)
        apart = [rig.ask(one, FEW).tokens for one in batch]
        found = [("device", rig.ask(PROMPT, NEW))]
        rig.evict("device")
        found.append(("host", rig.ask(PROMPT, NEW)))
        rig.check_idle()
    with Rig(pair, **options) as rig:
        together = rig.run(rig.send(PROMPT, NEW), *[rig.send(one, FEW) for one in batch])
        found.append(("storage", together[0]))
        assert [answer.tokens for answer in together[1:]] == apart
        rig.check_idle()
    for tier, answer in found:
        assert answer.cached == {"device": 0, "host": 0, "storage": 0} | {tier: HIT}
        assert (answer.finished.usage.load_ms > 0) == (tier != "device")
        assert answer.tokens == cold.tokens
        assert not draft or answer.proposals == cold.proposals


@pytest.mark.parametrize(("kind", "chunk", "draft"), CASES)
def test_what_is_partly_lost_shortens_a_hit_and_changes_no_token(
    make_pair: Callable[[str], Pair], kind: str, chunk: int, draft: bool
) -> None:
    """Evicts pages of one group after another, from the device, then from both memory tiers."""
    pair = make_pair(kind)
    with Rig(pair, draft=draft, page_size=PAGE, chunked_prefill_size=chunk) as rig:
        cold = rig.ask(PROMPT, FEW)
        residency = rig.engine.cache.residency
        for tiers in ((residency.device,), (residency.device, residency.host)):
            for group in range(len(residency.schema.groups)):
                rig.settle()
                for tier in tiers:
                    residency.evict(tier, group, 5)
                answer = rig.ask(PROMPT, FEW)
                assert answer.tokens == cold.tokens
                if tiers == (residency.device,):
                    assert sum(answer.cached.values()) == HIT  # the host has the evicted pages
        rig.check_idle()


@pytest.mark.parametrize("kind", ["gemma3", "mistral", "deepseek-v3", "qwen3-next"])
def test_a_full_device_changes_no_token(make_pair: Callable[[str], Pair], kind: str) -> None:
    pair = make_pair(kind)
    prompts = [PROMPT[: 30 + 7 * i] + prompt(20, seed=i) for i in range(6)]
    with Rig(pair, page_size=PAGE) as rig:
        roomy = rig.run(*[rig.send(one, 24) for one in prompts])
    with Rig(pair, page_size=PAGE, device_tokens=192, host_bytes=1 << 22) as rig:
        answers = rig.run(*[rig.send(one, 24) for one in prompts])
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in roomy]
        assert rig.figure("preemptions_total") > 0
        rig.check_idle()
