"""64 concurrent requests, with a tenth of the device memory that they need."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from rig import Pair, Rig, prompt

from kvkeep.core.policy import Policy
from kvkeep.engine.build import open_store
from kvkeep.engine.client import EngineClient
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.core import Engine
from kvkeep.schema import Key, Schema
from kvkeep.server.app import create_app
from kvkeep.stores.base import Store
from kvkeep.testing.wrappers import WrapperStore

COUNT, PAGE = 64, 16
SHAPES = [(40 + 37 * i % 200, 16 + 11 * i % 32) for i in range(COUNT)]
"""Tokens of each prompt, and tokens to generate."""
NEED = sum(-(-(length + new) // PAGE) for length, new in SHAPES) * PAGE
RECORD = 24576  # bytes of a page on the host


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """64 prompts: each of four prefixes of 32 tokens with sixteen different continuations."""
    return [[*prompt(32, i % 4), *prompt(n - 32, i)] for i, (n, _) in enumerate(SHAPES)]


@pytest.fixture(scope="module")
def expected(tiny: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """Outputs of the prompts, eight at a time, with enough memory and without hits.

    test_runner compares a batch of eight with transformers' output for each prompt."""
    with Rig(tiny, draft=False, host_bytes=0) as rig:
        outputs = []
        for first in range(0, COUNT, 8):
            some = range(first, first + 8)
            names = [rig.send(prompts[i], SHAPES[i][1], namespace=str(i)) for i in some]
            outputs += [answer.tokens for answer in rig.run(*names)]
        assert rig.figure("preemptions_total") == 0
        return outputs


def variants() -> list[Any]:
    """All combinations; three always run, the others with ``-m slow``."""
    usual = [(True, 0, False, True), (True, 20, True, True), (False, 2000, True, False)]
    every = itertools.product((True, False), (0, 20, 2000), (False, True), (False, True))
    return [pytest.param(*one, marks=[] if one in usual else pytest.mark.slow) for one in every]


@pytest.mark.parametrize(("draft", "host", "storage", "aborts"), variants())
def test_all_finish(
    draft: bool, host: int, storage: bool, aborts: bool, tiny: Pair, tmp_path: Path,
    prompts: list[list[int]], expected: list[list[int]],
) -> None:  # fmt: skip
    options: dict[str, Any] = {"device_tokens": NEED // 10, "chunked_prefill_size": 128}
    options |= {"storage_dir": tmp_path} if storage else {}
    with Rig(tiny, draft=draft, host_bytes=host * RECORD, **options) as rig:
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
        assert batch >= 4
        assert recomputed <= computed - recomputed  # computes at most twice the tokens needed


class Reads(WrapperStore):
    """Counts how often each record is read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.seen: Counter[Key] = Counter()

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
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


@pytest.fixture
def served(tiny: Pair, tmp_path: Path) -> Iterator[tuple[Engine, str]]:
    """An engine on its own thread, and the URL of a server for it."""
    engine = Engine(
        EngineConfig(
            model=tiny.target, draft=tiny.draft, page_size=PAGE, num_steps=4,
            device_tokens=NEED // 10, chunked_prefill_size=128, storage_dir=tmp_path,
            policy=Policy(prefetch_min_tokens=0, recompute="never"),
        )
    )  # fmt: skip
    app = create_app(EngineClient(engine), engine.tokenizer)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    engine.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()
    engine.close()


@pytest.mark.anyio
async def test_streams_over_http(
    served: tuple[Engine, str], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """With the official client, which closes every fourth stream after its second event."""
    engine, url = served

    async def stream(number: int) -> list[int]:
        found: list[int] = []
        events = await client.completions.create(
            model=engine.info.name,
            prompt=prompts[number],
            max_tokens=SHAPES[number][1],
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async with events:
            count = 0
            async for event in events:
                count += 1
                for choice in event.choices:
                    found += choice.token_ids  # type: ignore[attr-defined]
                if number % 4 == 0 and count == 2:
                    break
        return found

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        outputs = await asyncio.gather(*map(stream, range(COUNT)))
    for number, (output, whole) in enumerate(zip(outputs, expected, strict=True)):
        assert output
        assert output == (whole[: len(output)] if number % 4 == 0 else whole)
    async with httpx.AsyncClient() as http:
        for _ in range(1200):
            page = (await http.get(f"{url}/metrics")).text
            if "kvkeep_leases 0.0" in page and "kvkeep_transfers_pending 0.0" in page:
                break
            await asyncio.sleep(0.05)
    assert "kvkeep_leases 0.0" in page
    assert "kvkeep_running_requests 0.0" in page
    assert "kvkeep_waiting_requests 0.0" in page
    engine.close()
    engine.cache.check()
    assert not engine.cache.residency.table.holds.any()
    counts = engine.scheduler.counts
    assert counts["step_sequences_total"] >= 4 * counts["steps_total"]
