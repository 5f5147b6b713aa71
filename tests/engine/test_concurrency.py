"""64 requests on a tenth of the device memory that they need."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from rig import Pair, Rig, prompt

from kvkeep.engine.build import open_store
from kvkeep.engine.config import EngineConfig
from kvkeep.schema import Key, Schema
from kvkeep.stores.base import Store
from kvkeep.testing.wrappers import WrapperStore

COUNT, PAGE = 64, 16
SHAPES = [(40 + 37 * i % 200, 16 + 11 * i % 32) for i in range(COUNT)]
"""Tokens of each prompt, and tokens to generate."""
NEED = sum(-(-(length + new) // PAGE) for length, new in SHAPES) * PAGE
RECORD = 4096 + 8192  # bytes of a page on the host, about


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Four conversations, each begun sixteen times: a common start of 32 tokens, then their own."""
    return [[*prompt(32, i % 4), *prompt(n - 32, i)] for i, (n, _) in enumerate(SHAPES)]


@pytest.fixture(scope="module")
def expected(tiny: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """One by one, with room for everything, and nothing to be found in any cache."""
    with Rig(tiny, host_bytes=0) as rig:
        outputs = []
        for i, (tokens, (_, new)) in enumerate(zip(prompts, SHAPES, strict=True)):
            outputs.append(rig.ask(tokens, new, namespace=str(i)).tokens)
        return outputs


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("host", [0, 10, 1000], ids="{} host pages".format)
@pytest.mark.parametrize("storage", [False, True])
@pytest.mark.parametrize("aborts", [False, True])
def test_all_finish(
    draft: bool, host: int, storage: bool, aborts: bool, tiny: Pair, tmp_path: Path,
    prompts: list[list[int]], expected: list[list[int]],
) -> None:  # fmt: skip
    options: dict[str, Any] = {"device_tokens": NEED // 10, "chunked_prefill_size": 128}
    options |= {"storage_dir": tmp_path} if storage else {}
    with Rig(tiny, draft=draft, host_bytes=host * 4 * RECORD, **options) as rig:
        names = [rig.send(tokens, new) for tokens, (_, new) in zip(prompts, SHAPES, strict=True)]
        dice = random.Random(0)
        gone = set()
        for turn in rig.turns():
            if turn % 16 == 0:
                rig.engine.cache.check()
            if aborts and dice.random() < 0.3:
                gone.add(name := dice.choice(names))
                rig.abort(name)
        for name, output in zip(names, expected, strict=True):
            answer = rig.answers[name]
            if name in gone:
                assert answer.tokens == output[: len(answer.tokens)]
            else:
                assert answer.tokens == output
        rig.check_idle()
        computed = rig.figure("computed_tokens_total")
        recomputed = rig.figure("recomputed_tokens_total")
        batch = rig.figure("step_sequences_total") / rig.figure("steps_total")
        print(
            "FIG",
            draft,
            host,
            storage,
            aborts,
            round(batch, 2),
            round(recomputed / (computed - recomputed), 3),
            rig.figure("preemptions_total"),
            computed,
        )
        assert batch >= 4
        assert recomputed <= computed - recomputed  # at most twice what is needed


class Reads(WrapperStore):
    """Counts how often each record is read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.seen: Counter[Key] = Counter()

    def read(self, keys: Seq[Key], out: Seq[memoryview]) -> list[bool]:
        self.seen.update(keys)
        return super().read(keys, out)


def test_one_prefix_is_read_once(tiny: Pair, tmp_path: Path) -> None:
    """After a restart, 64 requests with one stored prefix read each record of it once."""
    common = prompt(160)
    prompts = [[*common, *prompt(8, i)] for i in range(COUNT)]
    options: dict[str, Any] = {"storage_dir": tmp_path, "device_tokens": 1024}
    with Rig(tiny, **options) as rig:
        expected = [answer.tokens for answer in rig.run(*[rig.send(p, 4) for p in prompts])]
    reads: list[Reads] = []

    def counting(config: EngineConfig, schema: Schema) -> Store:
        store = open_store(config, schema)
        assert store is not None
        reads.append(Reads(store))
        return reads[0]

    with Rig(tiny, store=counting, **options) as rig:
        answers = rig.run(*[rig.send(tokens, 4) for tokens in prompts])
        assert [answer.tokens for answer in answers] == expected
        assert all(sum(answer.cached.values()) == 160 for answer in answers)
        assert sum(answer.cached["storage"] for answer in answers) >= 160
        rig.check_idle()
    assert set(reads[0].seen.values()) == {1}
    assert len(reads[0].seen) == 2 * 160 // PAGE
