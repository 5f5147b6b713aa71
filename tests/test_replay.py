"""Replay of traces: the figures of real ones, and of random ones beside a slow simulation."""

from __future__ import annotations

import itertools
import json
import lzma
import random
import sys
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvkeep.core.victims
from kvkeep import cli
from kvkeep.core.policy import Policy
from kvkeep.engine.config import GIB, EngineConfig
from kvkeep.engine.sizing import device_slots, host_slots
from kvkeep.models import state_sizes
from kvkeep.models.state_sizes import read_groups
from kvkeep.models.target.hf import survey_config
from kvkeep.models.target.survey import Inventory
from kvkeep.schema import ConfigError, Identity, Key, Schema
from kvkeep.sim import plot, run
from kvkeep.sim.plan import read_plan
from kvkeep.sim.replay import TIERS, Capacity, Hits, KeyStore, Result, replay
from kvkeep.sim.traces import Trace, read_trace, tokens_per_block
from kvkeep.testing.quota import ROOM, QuotaConformance

DATA = Path(__file__).parent / "data"
CONFIGS = Path(__file__).parent.parent / "docs" / "configs"
CONVERSATION = DATA / "mooncake_conversation_first2000.jsonl.xz"
SYNTHETIC = DATA / "mooncake_synthetic_first500.jsonl"
CODING = DATA / "weka_coding_dev40_blk64.jsonl.xz"


FILES = {"conversation": CONVERSATION, "synthetic": SYNTHETIC, "coding": CODING}


@cache
def real(name: str) -> Trace:
    return read_trace([FILES[name]])


@cache
def replayed(name: str, capacity: Capacity, policy: Policy | None = None) -> Result:
    """Of a real trace. Many tests compare with the same replay, which takes seconds."""
    return replay(real(name), capacity, policy)


@pytest.fixture(autouse=True)
def _surveyed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tests plan for the same few models, and a survey of one takes a second."""
    monkeypatch.setattr(state_sizes, "survey_config", lambda config: surveyed(json.dumps(config)))


@cache
def surveyed(config: str) -> Inventory:
    return survey_config(json.loads(config))


@pytest.fixture
def conversation() -> Trace:
    return real("conversation")


@pytest.fixture
def synthetic() -> Trace:
    return real("synthetic")


@pytest.fixture
def coding() -> Trace:
    return real("coding")


def write(file: Path, requests: list[list[int]], **more: int) -> Path:
    return write_lines(file, [{"timestamp": 0, "hash_ids": ids, **more} for ids in requests])


def write_lines(file: Path, requests: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return file


def of_lengths(file: Path, *prompts: tuple[int, int | None]) -> Path:
    """Prompts of so many blocks and tokens that go on one after another; None: not told."""
    told = [{"input_length": tokens} if tokens is not None else {} for _, tokens in prompts]
    lines = zip(prompts, told, strict=True)
    return write_lines(file, [{"hash_ids": list(range(n)), **more} for (n, _), more in lines])


# --- real traces; the integers are those of two other implementations


FIGURES = {  # requests, pages, and hits by the device's pages
    "conversation": (2000, 54_559, {None: 15_771, 10_000: 11_409, 5000: 6324, 1000: 2218}),
    "synthetic": (500, 12_833, {None: 1084, 10_000: 1049, 5000: 597, 1000: 145}),
    "coding": (
        1263,
        1_096_271,
        {None: 1_025_948, 20_000: 998_854, 10_000: 913_294, 5000: 661_222, 2000: 335_100},
    ),
}


@pytest.mark.parametrize(
    ("name", "device"), [(name, device) for name in FIGURES for device in FIGURES[name][2]]
)
def test_hits(name: str, device: int | None) -> None:
    """Of the coding trace at 5,000, a flat LRU that touches the head first would hit 56%, FIFO
    less."""
    requests, pages, hits = FIGURES[name]
    result = replayed(name, Capacity(device))
    assert (result.requests, result.pages) == (requests, pages)
    total = hits[device]
    assert result.hits == {"device": total, "host": 0, "storage": 0, "total": total}
    assert (result.evictions["device"] > 0) == (device is not None)


@pytest.mark.parametrize(
    ("name", "device", "host"),
    [
        ("conversation", 2000, 3000),
        ("synthetic", 300, 700),
        ("synthetic", 5000, 5000),
        ("coding", 1000, 4000),  # requests are up to 3,962 long
    ],
)
def test_two_exclusive_tiers_hit_as_one(name: str, device: int, host: int) -> None:
    one = replayed(name, Capacity(device + host))
    two = replayed(name, Capacity(device, host), Policy(write="write_back"))
    assert two.hits["total"] == one.hits["total"] == FIGURES[name][2][device + host]
    assert two.evictions["host"] == one.evictions["device"]
    assert two.hits["device"] == replayed(name, Capacity(device)).hits["total"]


def test_with_all_in_storage_nothing_is_missed() -> None:
    for policy in ("write_through", "write_back"):
        result = replayed("synthetic", Capacity(300, 600, 13_000), Policy(write=policy))
        assert result.hits["total"] == 1084
        assert result.hits["storage"] > 0 == result.evictions["storage"]


def test_storage_evicts_too() -> None:
    result = replayed("synthetic", Capacity(300, 600, 5000))
    assert result.evictions["storage"] > 0
    assert result.hits["total"] < 1084


def nested_lru(trace: Trace, *capacities: int) -> tuple[list[int], list[int]]:
    """Hits and evictions by tier, of three plain LRU caches under write-through.

    A request hits its longest prefix that is in any tier, each page in the highest one. Then every
    tier gets the whole request and keeps the newest pages that it has room for. Memory stamps a
    request once, its head last. Storage is touched for the hit before it is given the rest, each
    with its head last."""
    tiers: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
    hits, evictions = [0] * len(tiers), [0] * len(tiers)
    for blocks in trace:
        path = blocks.tolist()
        places = (next((i for i, tier in enumerate(tiers) if page in tier), None) for page in path)
        found = list(itertools.takewhile(lambda tier: tier is not None, places))
        for i in range(len(tiers)):
            hits[i] += found.count(i)
        hit, rest = path[: len(found)][::-1], path[len(found) :][::-1]
        for i, (tier, capacity) in enumerate(zip(tiers, capacities, strict=True)):
            for page in (*hit, *rest) if TIERS[i] == "storage" else (*rest, *hit):
                tier[page] = None
                tier.move_to_end(page)
            while len(tier) > capacity:
                tier.popitem(last=False)
                evictions[i] += 1
    return hits, evictions


def counted(result: Result) -> tuple[list[int], list[int]]:
    """Hits and evictions by tier, as :func:`nested_lru` returns them."""
    return [result.hits[tier] for tier in TIERS], [result.evictions[tier] for tier in TIERS]


@pytest.mark.parametrize(
    ("name", "capacities", "total"),
    [
        ("conversation", (1000, 2000, 4000), 5027),
        ("synthetic", (300, 600, 5000), 597),
        ("synthetic", (300, 600, 1000), 145),
    ],
)
def test_three_tiers_hit_as_three_nested_lru_caches(
    name: str, capacities: tuple[int, int, int], total: int
) -> None:
    result = replayed(name, Capacity(*capacities))
    assert counted(result) == nested_lru(real(name), *capacities)
    assert result.hits["total"] == total


def test_random_traces_in_three_tiers(tmp_path: Path) -> None:
    """Prompts have at most 12 pages: each fits the device, the share of the host that storage is
    read into, and what storage holds more than the host."""
    rng = random.Random(9)
    for _ in range(4):
        trace = read_trace([write(tmp_path / "t.jsonl", tree_walks(rng, 120))])
        for capacities in ((12, 24, 36), (14, 30, 60)):
            assert counted(replay(trace, Capacity(*capacities))) == nested_lru(trace, *capacities)


def test_storage_with_room_for_half_a_prompt_keeps_its_head(tmp_path: Path) -> None:
    first, second, third = (list(range(start, start + 6)) for start in (0, 10, 20))
    trace = read_trace([write(tmp_path / "t.jsonl", [first, second, third, first])])
    result = replay(trace, Capacity(6, 12, 15))
    assert result.hits == {"device": 0, "host": 0, "storage": 3, "total": 3}


def test_selective_saves_what_is_hit_often() -> None:
    few = replayed("coding", Capacity(2000, 4000), Policy(write="write_through_selective"))
    all_of_it = replayed("coding", Capacity(2000, 4000))
    assert few.hits["device"] == all_of_it.hits["device"] == 335_100
    assert 0 < few.evictions["host"] < all_of_it.evictions["host"]


def test_each_request_s_hits_are_told(synthetic: Trace) -> None:
    """And what was hit below a tier was brought through those above."""
    told: list[Hits] = []
    result = replay(synthetic, Capacity(300, 600, 5000), tell=told.append)
    hits = np.array(told)
    assert hits.shape == (len(synthetic), len(TIERS))
    assert (
        dict(zip(TIERS, hits.sum(axis=0).tolist(), strict=True)) | {"total": hits.sum()}
        == result.hits
    )
    assert (hits.sum(axis=1) <= np.diff(synthetic.ends, prepend=0)).all()
    assert result.moved["load"] == hits[:, 1:].sum()
    assert result.moved["read"] == hits[:, 2].sum() > 0


def test_more_room_than_there_are_pages_is_not_taken(tmp_path: Path) -> None:
    trace = read_trace([write(tmp_path / "t.jsonl", tree_walks(random.Random(9), 120))])
    huge, enough = 10**30, len(trace.blocks)
    for policy in (Policy(), Policy(write="write_back"), Policy(write="write_through_selective")):
        told = replay(trace, Capacity(12, enough, enough), policy)
        assert told.evictions["device"] > 0
        assert replay(trace, Capacity(12, huge, huge), policy) == told
    assert replay(trace, Capacity(huge)) == replay(trace, Capacity(None))


def test_a_prompt_that_says_one_thing_again_and_again_has_room(tmp_path: Path) -> None:
    trace = read_trace([write(tmp_path / "t.jsonl", [[1, 1, 1], [1, 1, 1]])])
    assert replay(trace, Capacity()).hits["total"] == 3


@pytest.mark.parametrize("host", [0, 1])
def test_storage_needs_a_host_to_be_read_into(synthetic: Trace, host: int) -> None:
    with pytest.raises(ConfigError, match=f"storage is read into .* the host.*not {host}"):
        replay(synthetic, Capacity(300, host, 5000))


def test_a_device_of_no_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="the device must hold at least one page"):
        Capacity(0)


class TestKeyStore(QuotaConformance):
    """It keeps keys, and has no bytes to compare."""

    @pytest.fixture
    def store(self) -> KeyStore:
        return KeyStore(1000)

    @pytest.fixture
    def small(self) -> KeyStore:
        return KeyStore(ROOM)

    def holds(self, buffer: memoryview, key: Key) -> bool:
        return True


# --- random traces


def simulate(trace: Trace, capacity: int, rank: str) -> Result:
    """One tier, the slow way: of the blocks that nobody continues, the lowest goes."""
    above: dict[int, int | None] = {}  # resident blocks, and the one before each
    used: dict[int, int] = {}
    reused: dict[int, int] = {}
    hits = evictions = 0
    for now, blocks in enumerate(trace):
        path = [int(block) for block in blocks]
        count = next((i for i, block in enumerate(path) if block not in above), len(path))
        hits += count
        for block in path[:count]:
            used[block], reused[block] = now, reused[block] + 1
        for i in range(count, len(path)):
            if len(above) == capacity:
                leaves = above.keys() - set(above.values()) - set(path[:i])
                if not leaves:
                    break
                keys = {b: (reused[b] if rank == "lfu" else 0, used[b]) for b in leaves}
                del above[min(leaves, key=keys.__getitem__)]
                evictions += 1
            block = path[i]
            above[block], used[block], reused[block] = path[i - 1] if i else None, now, 0
    total = {"device": hits, "host": 0, "storage": 0, "total": hits}
    nothing = dict.fromkeys(("save", "load", "write", "read"), 0)
    evicted = {"device": evictions, "host": 0, "storage": 0}
    return Result(len(trace), len(trace.blocks), total, evicted, nothing)


def tree_walks(rng: random.Random, requests: int) -> list[list[int]]:
    """Paths in a tree whose blocks are numbered so that deeper ones have higher numbers."""
    names: dict[tuple[int, ...], int] = {}
    paths = []
    for _ in range(requests):
        depth = rng.randrange(12)
        steps = tuple(min(2, int(rng.expovariate(1.5))) for _ in range(depth))
        prefixes = [steps[: i + 1] for i in range(depth)]
        paths.append([names.setdefault(p, 10_000 * len(p) + len(names)) for p in prefixes])
    return paths


@pytest.mark.parametrize("select", [0.02, 0.4])
@pytest.mark.parametrize("rank", ["lru", "lfu"])
def test_random_traces_beside_a_slow_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, select: float
) -> None:
    """Also where victims are put in order many at a time, and change before they go."""
    monkeypatch.setattr(kvkeep.core.victims, "_SELECT", select)
    rng = random.Random(5)
    for _ in range(8):
        trace = read_trace([write(tmp_path / "t.jsonl", tree_walks(rng, 120))])
        for capacity in (1, 5, 14, 40):
            result = replay(trace, Capacity(capacity), Policy(rank))
            assert result == simulate(trace, capacity, rank)


def test_of_a_request_that_is_too_long_the_head_is_put_in(tmp_path: Path) -> None:
    """That fits on the device, or in two tiers that are as one."""
    trace = read_trace([write(tmp_path / "t.jsonl", [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])])
    assert replay(trace, Capacity(3)).hits["total"] == 3
    assert replay(trace, Capacity(3, 1)).hits["total"] == 3
    for host, hits in ((1, 4), (4, 5)):
        both = replay(trace, Capacity(3, host), Policy(write="write_back"))
        assert both.hits == {"device": 3, "host": hits - 3, "storage": 0, "total": hits}


def test_priorities_are_read(tmp_path: Path) -> None:
    """What comes once with a high priority outlives what comes later without."""
    important = write(tmp_path / "a.jsonl", [[1, 2, 3]], priority=9)
    others = write(tmp_path / "b.jsonl", [[7, 8], [10, 11], [12, 13], [1, 2, 3]])
    trace = read_trace([important, others])
    assert replay(trace, Capacity(5), Policy("priority")).hits["total"] == 3
    assert replay(trace, Capacity(5)).hits["total"] == 0


# --- traces


def test_a_trace_is_its_blocks_by_dense_ids(tmp_path: Path) -> None:
    trace = read_trace([write(tmp_path / "t.jsonl", [[700, 10**25], [], [700, 3]])])
    assert [blocks.tolist() for blocks in trace] == [[0, 1], [], [0, 2]]
    assert (len(trace), trace.distinct, trace.longest) == (3, 3, 2)
    assert replay(trace, Capacity()).hits["total"] == 1


@pytest.mark.parametrize(
    ("prompts", "tokens"),
    [
        ([(3, 2048 - 511), (3, 1536), (40, 40 * 512 - 9)], 512),  # the last block may be partial
        ([(240, 15_422), (262, 16_823), (0, 5)], 64),  # or, as here, have no id
        ([(3, 300), (201, 20_001)], 100),  # nothing else fits
        ([(240, 15_422), (7, None)], 64),
    ],
)
def test_lengths_of_prompts_tell_how_large_blocks_are(
    tmp_path: Path, prompts: list[tuple[int, int | None]], tokens: int
) -> None:
    traces = [read_trace([of_lengths(tmp_path / "t.jsonl", *prompts)])]
    assert tokens_per_block(traces, None) == tokens_per_block(traces, tokens) == tokens
    for wrong in (tokens // 2, tokens * 2):
        with pytest.raises(ConfigError, match=f"--block-tokens {wrong} does not fit .*{tokens}"):
            tokens_per_block(traces, wrong)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([(3, None)], "give --block-tokens: .*allow 1 to inf"),
        ([(1, 700)], "give --block-tokens: .*allow 351 to inf"),
        ([(3, 96), (3, 960)], "no --block-tokens fits"),
    ],
)
def test_blocks_of_unknown_size_are_asked_for(
    tmp_path: Path, prompts: list[tuple[int, int | None]], message: str
) -> None:
    traces = [read_trace([of_lengths(tmp_path / "t.jsonl", *prompts)])]
    with pytest.raises(ConfigError, match=message):
        tokens_per_block(traces, None)


def test_real_traces_tell_their_blocks(
    conversation: Trace, synthetic: Trace, coding: Trace
) -> None:
    sizes = [tokens_per_block([trace], None) for trace in (conversation, synthetic, coding)]
    assert sizes == [512, 512, 64]
    with pytest.raises(ConfigError, match="no --block-tokens fits"):
        tokens_per_block([synthetic, coding], None)


def test_an_empty_trace_is_no_error(tmp_path: Path) -> None:
    assert replay(read_trace([write(tmp_path / "t.jsonl", [])]), Capacity()).ratio == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.jsonl",
            b'{"hash_ids": [1]}\n{"hash_ids": "no"}\n',
            "t.jsonl, line 2: Expected `array`",
        ),
        ("t.jsonl", b"{}", "t.jsonl, line 1: .*hash_ids"),
        ("t.jsonl", b'{"hash_ids": [1], "priority": 256}', "t.jsonl, line 1"),
        ("t.jsonl.xz", b"not compressed", "t.jsonl.xz, line 1"),
        ("t.jsonl.xz", lzma.compress(b'{"hash_ids": [1]}\n' * 9)[:-20], "t.jsonl.xz, line"),
    ],
)
def test_what_is_no_trace_is_told(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_trace([tmp_path / name])


# --- the command


def command(*words: object, columns: int = 140) -> str:
    arguments = ["replay", *map(str, words)]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": str(columns)})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_the_command_prints_and_writes_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    flags = "--device-pages 1000 --host-pages 4000 --write-policy write_back --eviction lru"
    shown = command(SYNTHETIC, *flags.split(), "--json", out)
    assert "12,833" in shown
    assert "4.65%" in shown
    assert json.loads(out.read_text()) == {
        "requests": 500,
        "pages": 12_833,
        "hits": {"device": 145, "host": 452, "storage": 0, "total": 597},
        "evictions": {"device": 11_688, "host": 7236, "storage": 0},
        "moved": {"save": 11_688, "load": 452, "write": 0, "read": 0},
    }


def test_a_plan_is_in_gib_and_tokens(tmp_path: Path) -> None:
    """Llama 3.1 8B in bfloat16: 128 KiB a token; its EAGLE-3 draft, of one layer: 4 KiB, and with
    each page the feature of its last token. A prompt's last block is as long as it is."""
    target, draft = CONFIGS / "llama-3.1-8b.json", CONFIGS / "llama-3.1-8b.eagle3.json"
    page, footer = 512 * 128 * 1024, 4096
    plan = read_plan([target], 512, "bfloat16")
    assert plan.page_bytes == {"device": page, "host": page, "storage": page + footer}
    with_draft = read_plan([target, draft], 512, "bfloat16").page_bytes
    assert with_draft["device"] == page + 512 * 4 * 1024 + 4096 * 2
    assert plan.capacity(2.5, 1, 0) == Capacity(40, 16, 0)
    out = tmp_path / "figures.json"
    flags = ["--model", target, "--gib", 312.5, 0, 0, "--json", out]
    shown = command(SYNTHETIC, *flags)
    assert "saved 304,687 of 6,403,130 prefill tokens" in shown
    assert "a page is 512 tokens; in MiB: device 64.00, host 64.00, storage 64.00" in shown
    assert json.loads(out.read_text())["plan"] == {
        "page_tokens": 512,
        "page_bytes": {"device": page, "host": page, "storage": page + footer},
        "prompt_tokens": 6_403_130,
        "saved_tokens": 304_687,  # 597 blocks, of which some are partial
        "moved_bytes": {"save": 0, "load": 0, "write": 0, "read": 0},
    }
    flags[2:6] = ["--device-pages", 1000, "--host-pages", 4000]
    shown = command(SYNTHETIC, *flags, "--write-policy", "write_back")
    assert "moved, in GiB: save 730.5, load 28.2" in shown
    moved = {"save": 11_688 * page, "load": 452 * page, "write": 0, "read": 0}
    assert json.loads(out.read_text())["plan"]["moved_bytes"] == moved


def test_what_comes_from_storage_moves_twice(tmp_path: Path) -> None:
    flags = ["--device-pages", "300", "--host-pages", "600", "--storage-pages", "5000"]
    out, model = tmp_path / "figures.json", CONFIGS / "llama-3.1-8b.json"
    command(SYNTHETIC, *flags, "--model", model, "--json", out)
    figures = json.loads(out.read_text())
    assert 0 < figures["moved"]["read"] < figures["moved"]["load"]
    page = 512 * 128 * 1024
    moved = {lane: pages * page for lane, pages in figures["moved"].items()}
    assert figures["plan"]["moved_bytes"] == moved


def test_a_hit_of_a_partial_block_saves_what_it_has(tmp_path: Path) -> None:
    trace = of_lengths(tmp_path / "t.jsonl", (3, 1100), (3, 1100), (2, 1024), (4, None))
    shown = command(trace, "--model", CONFIGS / "llama-3.1-8b.json")
    saved = 0 + 1100 + 1024 + 3 * 512
    assert f"saved {saved:,} of {1100 + 1100 + 1024 + 2048:,} prefill tokens" in shown


def test_a_trace_with_other_blocks_is_not_planned_as_if_they_were_512(tmp_path: Path) -> None:
    trace = of_lengths(tmp_path / "t.jsonl", (240, 15_422), (240, 15_422))
    config = CONFIGS / "llama-3.1-8b.json"
    assert f"saved {240 * 64:,} of {2 * 15_422:,}" in command(trace, "--model", config)
    with pytest.raises(ConfigError, match="--block-tokens 512 does not fit"):
        command(trace, "--model", config, "--block-tokens", 512)


@pytest.mark.parametrize(
    "name", ["llama-3.1-70b", "gemma-3-27b", "gemma-2-27b", "gpt-oss-120b", "mistral-7b-v0.1"]
)
def test_a_plan_counts_pages_as_the_engine_counts_slots(name: str) -> None:
    """What the engine's pools take is what the plan says that as many pages take."""
    file = CONFIGS / f"{name}.json"
    schema = Schema(Identity("m"), 512, read_groups(file, 512, "bfloat16"))
    config = EngineConfig(
        model=file, page_size=512, device_tokens=512 * 100_000, host_bytes=900 * GIB
    )
    device = device_slots(config, schema, torch.device("cpu"), 1)
    host = host_slots(config, schema, device)
    taken = sum(
        group.page_bytes * slots for group, slots in zip(schema.groups, device, strict=True)
    )
    planned = read_plan([file], 512, "bfloat16").capacity(taken / GIB, 900, 0)
    assert planned.device == pytest.approx(max(device), abs=2)
    assert planned.host == pytest.approx(max(host), abs=2)


def test_windows_are_stored_with_every_page_and_brought_where_a_hit_ends(tmp_path: Path) -> None:
    """Gemma 3: 10 layers keep every page, 52 have a window of 1,024 tokens, two pages."""
    layer, out = 512 * 2 * 16 * 128 * 2, tmp_path / "figures.json"
    trace = of_lengths(tmp_path / "t.jsonl", (9, 9 * 512), (9, 9 * 512))
    flags = ["--device-pages", 3, "--host-pages", 40, "--model", CONFIGS / "gemma-3-27b.json"]
    command(trace, *flags, "--write-policy", "write_back", "--json", out)
    figures = json.loads(out.read_text())
    plan = figures["plan"]
    assert plan["page_bytes"] == {
        "device": round((10 + 0.8 * 52) * layer),
        "host": round((10 + 0.8 * 52) * layer),
        "storage": 62 * layer + 2 * 4096,
    }
    assert figures["moved"]["load"] == 6
    assert plan["moved_bytes"]["load"] == (6 * 10 + 2 * 52) * layer
    assert plan["moved_bytes"]["save"] == figures["moved"]["save"] * 62 * layer


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "granite-4.0-h-small", "lfm2-1.2b"])
def test_snapshots_are_not_planned(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}\.json: .*snapshots"):
        read_plan([CONFIGS / f"{name}.json"], 512, "bfloat16")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model CONFIG --gib 1 0 0 --device-pages 9", "leave out --gib or --.-pages"),
        ("--model CONFIG --gib 1 0 0 --host-pages 0", "leave out --gib or --.-pages"),
        ("--gib 1 0 0 --storage-pages 9", "leave out --gib or --.-pages"),
        ("--gib 1 0 0", "--gib wants --model CONFIG"),
        ("--model CONFIG --gib 1 -1 0", "a tier cannot have -1 GiB"),
        ("--model CONFIG --gib nan 0 0", "a tier cannot have nan GiB"),
        ("--model CONFIG --gib inf 0 0", "a tier cannot have inf GiB"),
        ("--model CONFIG --gib 0 1 0", "the device must hold at least one page"),
        ("--model CONFIG --gib 0.05 0 0", "0.05 GiB hold no page: .*device.*0.0625 GiB"),
        ("--model CONFIG --gib 40 0.05 100", "0.05 GiB hold no page: .*host.*0.0625 GiB"),
        ("--model CONFIG --gib 40 0 100", "storage is read into"),
        ("--device-pages 1000 --storage-pages 100000", "storage is read into"),
    ],
)
def test_sizes_are_in_pages_or_in_gib(flags: str, message: str) -> None:
    config = str(CONFIGS / "llama-3.1-8b.json")
    with pytest.raises(ConfigError, match=message):
        command(SYNTHETIC, *(config if flag == "CONFIG" else flag for flag in flags.split()))


def test_sizes_may_be_larger_than_any_machine() -> None:
    config = CONFIGS / "llama-3.1-8b.json"
    unlimited = command(SYNTHETIC, "--model", config)
    assert "1,084" in unlimited
    for flags in (["--gib", 1e30, 0, 0], ["--device-pages", 10**20]):
        assert command(SYNTHETIC, "--model", config, *flags) == unlimited
    assert "1,084" in command(SYNTHETIC, "--model", config, "--gib", 40, 1e12, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "model.json: "), ('{"model_type": "mamba"}', "mamba keeps no state")],
)
def test_a_plan_needs_a_config(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_plan([tmp_path / "none.json"], 512, "bfloat16")
    (tmp_path / "model.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_plan([tmp_path / "model.json"], 512, "bfloat16")


def test_several_traces(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", [[1, 2], [1, 2]])
    b = write(tmp_path / "b.jsonl", [[1, 2, 3]])
    out = tmp_path / "figures.json"
    assert "all" in command(a, b, "--json", out)
    figures = json.loads(out.read_text())
    assert (figures["requests"], figures["pages"], figures["hits"]["total"]) == (3, 7, 2)
    assert [trace["hits"]["total"] for trace in figures["traces"].values()] == [2, 0]
    command(a, b, "--together", "--json", out)
    figures = json.loads(out.read_text())
    assert figures["hits"]["total"] == 4
    assert "traces" not in figures


def test_traces_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    files = [tmp_path / name / "t.jsonl" for name in "ab"]
    for count, file in enumerate(files):
        file.parent.mkdir()
        write(file, [[1, 2, 3]] * count)
    command(*files, "--json", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert {name: trace["pages"] for name, trace in figures["traces"].items()} == {
        str(files[0]): 0,
        str(files[1]): 3,
    }


@pytest.mark.parametrize("columns", [40, 80])
def test_a_narrow_table_has_every_figure_and_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "[red]x[blue]" + "y" * 70 + ".jsonl"
    write(tmp_path / name, [[1, 2]])
    counts = dict.fromkeys((*TIERS, "total"), 123_456_789)
    result = Result(12_345_678, 987_654_321, counts, dict.fromkeys(TIERS, 234_567_891), {})
    monkeypatch.setattr(run, "replay", lambda *_: result)
    shown = command(name, "--host-pages", 4, "--storage-pages", 9, columns=columns)
    lines = shown[shown.index("requests") :].splitlines()[1:]
    rows = [line.split() for line in lines]
    figures = ["12,345,678", "987,654,321", "device", "123,456,789", "12.50%", "234,567,891"]
    assert rows[0][1:] == figures
    assert "".join(line[: lines[0].index("12,345")].strip() for line in lines) == name
    assert [word for row in rows for word in row if word in counts] == list(counts)
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("flag", ["--json", "--plot"])
def test_what_cannot_be_written_is_told_before_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr(run, "replay", lambda *_: pytest.fail("it replays"))
    monkeypatch.setattr(run, "need_matplotlib", lambda: None)
    with pytest.raises(ConfigError, match=r"cannot write .*x\.json: there is no directory"):
        command(SYNTHETIC, flag, tmp_path / "none" / "x.json")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eviction fifo", "--eviction must be one of lru, lfu, priority, not 'fifo'"),
        ("--write-policy never", "--write-policy must be one of write_through,"),
        ("--write-through-threshold 0", "--write-through-threshold must be at least 1, not 0"),
    ],
)
def test_unknown_policies_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command(SYNTHETIC, *flags.split())


def test_the_threshold_of_selective_writes_is_a_flag(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", [[1, 2], [1, 2], [1, 2]])
    flags = "--host-pages 9 --write-policy write_through_selective --write-through-threshold"
    saved = {}
    for hits in (1, 2, 3):
        command(trace, *flags.split(), hits, "--json", tmp_path / "figures.json")
        saved[hits] = json.loads((tmp_path / "figures.json").read_text())["moved"]["save"]
    assert saved == {1: 2, 2: 2, 3: 0}


def test_a_number_of_pages_is_one() -> None:
    for pages in ("0", "-1", "many"):
        assert "neither a number of pages" in command(SYNTHETIC, "--device-pages", pages)


# --- the plot


def test_a_plot_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvkeep\[plot\]'"):
        command(SYNTHETIC, "--plot", tmp_path / "plot.svg")


def test_a_plot_has_a_line_per_order(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = write(tmp_path / "t.jsonl", tree_walks(random.Random(1), 50))
    command(trace, "--plot", tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.startswith("<?xml")
    with pytest.raises(ConfigError, match="cannot write the plot"):
        plot.draw(tmp_path / "plot.docx", [plot.Line("lru", [1, 2], [0.1, 0.2])], "pages")


def test_the_plot_of_a_plan_is_in_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[tuple[Sequence[plot.Line], str]] = []
    monkeypatch.setattr(run, "draw", lambda _, lines, unit: drawn.append((lines, unit)))
    config = CONFIGS / "llama-3.1-8b.json"
    trace = write(tmp_path / "t.jsonl", [[1, 2, 3, 4], [1, 2, 3, 4]], input_length=2048)
    for flags in ([], ["--model", config]):  # 512 tokens are 64 MiB
        command(trace, "--plot", tmp_path / "plot.svg", *flags)
    (pages, in_pages), (gib, in_gib) = drawn
    assert (in_pages, in_gib) == ("pages", "GiB")
    assert pages[0] == plot.Line("lru", [1, 2, 4], [1 / 8, 2 / 8, 4 / 8])
    assert gib[0] == plot.Line("lru", [1 / 16, 2 / 16, 4 / 16], pages[0].ratios)
