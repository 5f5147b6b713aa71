"""Write policies and eviction orders in the engine: tokens are the same under each of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rig import Pair, Rig, prompt

from kvkeep.core.ticket import READ
from kvkeep.engine.build import open_store
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.messages import Failed
from kvkeep.schema import Residence, Schema
from kvkeep.testing.wrappers import ThrottledStore

COUNT, NEW = 12, 24
RECORD = 24576  # bytes of a page on the host
PROMPTS = [[*prompt(32, i % 3), *prompt(40 + 17 * i % 90, i)] for i in range(COUNT)]


@pytest.fixture(scope="module")
def expected(tiny: Pair) -> list[list[int]]:
    with Rig(tiny, draft=False, host_bytes=0) as rig:
        return [rig.ask(tokens, NEW).tokens for tokens in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        {"write": "write_back"},
        {"write": "write_back", "eviction": "lfu"},
        {"write": "write_through_selective", "eviction": "priority"},
    ],
    ids=str,
)
def test_all_finish_alike(tiny: Pair, options: dict[str, str], expected: list[list[int]]) -> None:
    with Rig(tiny, device_tokens=512, host_bytes=60 * RECORD, **options) as rig:
        for _ in range(2):  # the second time, there are hits on the host
            names = [rig.send(tokens, NEW) for tokens in PROMPTS]
            answers = rig.run(*names)
            assert [answer.tokens for answer in answers] == expected
            rig.check_idle()
        assert rig.figure("evicted_pages_total") > 0
        if options["write"] == "write_back":
            assert rig.engine.figures()["hit_tokens_total{tier=host}"] > 0


def test_write_back_survives_a_restart(tiny: Pair, tmp_path: Path) -> None:
    options = {"write": "write_back", "storage_dir": tmp_path, "host_bytes": 4 * RECORD}
    with Rig(tiny, draft=False, **options) as rig:
        expected = [rig.ask(tokens, NEW).tokens for tokens in PROMPTS[:2]]
        assert rig.figure("moved_bytes_total") == 0
    with Rig(tiny, draft=False, storage_dir=tmp_path) as rig:
        again = [rig.ask(tokens, NEW) for tokens in PROMPTS[:2]]
        assert [answer.tokens for answer in again] == expected
        assert all(answer.cached["storage"] == (len(tokens) - 1) // 16 * 16
                   for answer, tokens in zip(again, PROMPTS, strict=False))  # fmt: skip


def test_a_request_s_priority_reaches_its_pages(tiny: Pair) -> None:
    with Rig(tiny) as rig:
        rig.ask(prompt(40), 4, priority=9)
        table = rig.engine.cache.residency.table
        assert set(table.priority[table.state[0, 0] == Residence.LIVE].tolist()) == {9}
        assert set(table.until[table.priority == 9].tolist()) == {float("inf")}
        rig.ask(prompt(40, 1), 4, priority=8, ttl=1000.0)
        left = table.until[table.priority == 8] - time.monotonic()
        assert len(left)
        assert ((left > 0) & (left < 1000)).all()
        failed = rig.ask(prompt(40), 4, priority=256).end
        assert isinstance(failed, Failed)
        assert (failed.kind, failed.message) == (
            "RequestError", "priority must be from 0 to 255, not 256",
        )  # fmt: skip


# --- load or recompute


def test_pure_prefill_of_some_size_is_timed(tiny: Pair) -> None:
    with Rig(tiny, chunked_prefill_size=64) as rig:
        seen: list[int] = []
        rig.engine.cache.observe_prefill = lambda tokens, seconds: seen.append(tokens)
        rig.ask(prompt(100), 4)
        assert seen == [], "too short to be representative"
        rig.ask(prompt(200, 1), 4)
        assert seen == [200], "the sum of all chunks, once the last one has sampled"
        rig.send(prompt(20, 2), 40)
        for turn in rig.turns():
            if turn == 5:
                rig.send(prompt(200, 3), 1)
        assert seen == [200], "steps that also decode are not timed"


def test_a_slow_store_is_not_waited_for(tiny: Pair, tmp_path: Path) -> None:
    """The engine recomputes the prefix, with the same tokens; a fast store gives hits again."""
    stores: list[ThrottledStore] = []

    def thin(config: EngineConfig, schema: Schema) -> ThrottledStore:
        store = open_store(config, schema)
        assert store is not None
        stores.append(ThrottledStore(store, 1e12))
        return stores[0]

    with Rig(tiny, store=thin, storage_dir=tmp_path, recompute="auto") as rig:
        tokens = prompt(400)
        first = rig.ask(tokens, 4)
        rig.evict("device", "host")
        stores[0].bytes_per_second = 1e5  # 6 seconds
        slow = rig.ask(tokens, 4)
        assert slow.tokens == first.tokens
        assert slow.cached["storage"] == 0
        assert rig.figure("skipped_tokens_total") == 384
        stores[0].bytes_per_second = 1e12
        rig.evict("device", "host")
        rig.engine.cache.transfers.speeds[READ].observe(1 << 40, 1e-3)
        assert rig.ask(tokens, 4).cached["storage"] == 384
