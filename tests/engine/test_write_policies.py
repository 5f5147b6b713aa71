"""Requests that need more than the device has end with the same tokens under every policy."""

from __future__ import annotations

import pytest
from rig import Pair, Rig, prompt

COUNT, NEW = 12, 24
RECORD = 24576  # bytes of a page on the host
PROMPTS = [[*prompt(32, i % 3), *prompt(40 + 17 * i % 90, i)] for i in range(COUNT)]


@pytest.mark.parametrize(
    "options",
    [
        {"write_policy": "write_back"},
        {"write_policy": "write_back", "eviction": "lfu"},
        {"write_policy": "write_through_selective", "eviction": "priority"},
    ],
    ids=str,
)
def test_all_finish_alike(tiny: Pair, options: dict[str, str]) -> None:
    with Rig(tiny, draft=False, host_bytes=0) as rig:
        expected = [rig.ask(tokens, NEW).tokens for tokens in PROMPTS]
    with Rig(tiny, device_tokens=512, host_bytes=60 * RECORD, **options) as rig:
        for _ in range(2):  # the second time, some of it comes back from the host
            names = [rig.send(tokens, NEW) for tokens in PROMPTS]
            answers = rig.run(*names)
            assert [answer.tokens for answer in answers] == expected
            rig.check_idle()
        assert rig.figure("evicted_pages_total") > 0
        if options["write_policy"] == "write_back":
            assert rig.engine.figures()["hit_tokens_total{tier=host}"] > 0
