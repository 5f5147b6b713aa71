"""Replay of traces: the figures of real ones, and of random ones beside a slow simulation."""

from __future__ import annotations

import json
import lzma
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvkeep.tier
from kvkeep import cli
from kvkeep.policy import EVICTION, Policy
from kvkeep.schema import ConfigError
from kvkeep.sim import plot, run
from kvkeep.sim.plan import Plan, read_plan
from kvkeep.sim.replay import Capacity, Result, replay
from kvkeep.sim.traces import Trace, read_trace

DATA = Path(__file__).parent / "data"
CONVERSATION = DATA / "mooncake_conversation_first2000.jsonl.xz"
SYNTHETIC = DATA / "mooncake_synthetic_first500.jsonl"
CODING = DATA / "weka_coding_dev40_blk64.jsonl.xz"


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return read_trace([CONVERSATION])


@pytest.fixture(scope="module")
def synthetic() -> Trace:
    return read_trace([SYNTHETIC])


@pytest.fixture(scope="module")
def coding() -> Trace:
    return read_trace([CODING])


def write(file: Path, requests: list[list[int]], **more: int) -> Path:
    lines = (json.dumps({"timestamp": 0, "hash_ids": ids, **more}) for ids in requests)
    file.write_text("\n".join(lines) + "\n")
    return file


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
def test_hits(request: pytest.FixtureRequest, name: str, device: int | None) -> None:
    """Of the coding trace at 5,000, a flat LRU that touches the head first would hit 56%, FIFO
    less."""
    requests, pages, hits = FIGURES[name]
    result = replay(request.getfixturevalue(name), Capacity(device))
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
def test_two_exclusive_tiers_hit_as_one(
    request: pytest.FixtureRequest, name: str, device: int, host: int
) -> None:
    trace: Trace = request.getfixturevalue(name)
    one = replay(trace, Capacity(device + host))
    two = replay(trace, Capacity(device, host), Policy(write="write_back"))
    assert two.hits["total"] == one.hits["total"] == FIGURES[name][2][device + host]
    assert two.evictions["host"] == one.evictions["device"]
    assert two.hits["device"] == replay(trace, Capacity(device)).hits["total"]


def test_with_all_in_storage_nothing_is_missed(synthetic: Trace) -> None:
    for policy in ("write_through", "write_back"):
        result = replay(synthetic, Capacity(300, 600, 13_000), Policy(write=policy))
        assert result.hits["total"] == 1084
        assert result.hits["storage"] > 0 == result.evictions["storage"]


def test_storage_evicts_too(synthetic: Trace) -> None:
    result = replay(synthetic, Capacity(300, 600, 5000))
    assert result.evictions["storage"] > 0
    assert result.hits["total"] < 1084


def test_selective_saves_what_is_hit_often(coding: Trace) -> None:
    few = replay(coding, Capacity(2000, 4000), Policy(write="write_through_selective"))
    all_of_it = replay(coding, Capacity(2000, 4000))
    assert few.hits["device"] == all_of_it.hits["device"] == 335_100
    assert 0 < few.evictions["host"] < all_of_it.evictions["host"]


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
    monkeypatch.setattr(kvkeep.tier, "_SELECT", select)
    rng = random.Random(5)
    for _ in range(8):
        trace = read_trace([write(tmp_path / "t.jsonl", tree_walks(rng, 120))])
        for capacity in (1, 5, 14, 40):
            result = replay(trace, Capacity(capacity), Policy(EVICTION[rank]))
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
    assert replay(trace, Capacity(5), Policy(EVICTION["priority"])).hits["total"] == 3
    assert replay(trace, Capacity(5)).hits["total"] == 0


# --- traces


def test_a_trace_is_its_blocks_by_dense_ids(tmp_path: Path) -> None:
    trace = read_trace([write(tmp_path / "t.jsonl", [[700, 10**25], [], [700, 3]])])
    assert [blocks.tolist() for blocks in trace] == [[0, 1], [], [0, 2]]
    assert (len(trace), trace.distinct, trace.longest) == (3, 3, 2)
    assert replay(trace, Capacity()).hits["total"] == 1


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


def command(*words: object) -> str:
    result = CliRunner().invoke(cli.app, ["replay", *map(str, words)], env={"COLUMNS": "140"})
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
    each page the feature of its last token, three layers wide."""
    configs = Path(__file__).parent.parent / "docs" / "configs"
    target, draft = configs / "llama-3.1-8b.json", configs / "llama-3.1-8b.eagle3.json"
    page = 512 * 128 * 1024
    assert read_plan([target], 512, "bfloat16") == Plan(512, page)
    both = read_plan([target, draft], 512, "bfloat16")
    assert both.page_bytes - page - 512 * 4 * 1024 in range(3 * 4096 * 2 + 1)
    assert both.pages(2.5) == 2.5 * 2**30 // both.page_bytes
    out = tmp_path / "figures.json"
    flags = ["--model", target, "--gib", 312.5, 0, 0, "--json", out]
    assert f"saved {597 * 512:,} of {12_833 * 512:,} prefill tokens" in command(SYNTHETIC, *flags)
    assert json.loads(out.read_text())["plan"] == {
        "page_tokens": 512,
        "page_bytes": page,
        "prompt_tokens": 12_833 * 512,
        "saved_tokens": 597 * 512,
        "moved_bytes": {"save": 0, "load": 0, "write": 0, "read": 0},
    }
    flags[2:6] = ["--device-pages", 1000, "--host-pages", 4000]
    shown = command(SYNTHETIC, *flags, "--write-policy", "write_back")
    assert "moved, in GiB: save 730.5, load 28.2" in shown
    moved = {"save": 11_688 * page, "load": 452 * page, "write": 0, "read": 0}
    assert json.loads(out.read_text())["plan"]["moved_bytes"] == moved


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model CONFIG --gib 1 0 0 --device-pages 9", "leave out --gib or --.-pages"),
        ("--model CONFIG --gib 1 0 0 --host-pages 0", "leave out --gib or --.-pages"),
        ("--gib 1 0 0 --storage-pages 9", "leave out --gib or --.-pages"),
        ("--gib 1 0 0", "--gib wants --model CONFIG"),
        ("--model CONFIG --gib 1 -1 0", "a tier cannot have -1 GiB"),
    ],
)
def test_sizes_are_in_pages_or_in_gib(flags: str, message: str) -> None:
    config = Path(__file__).parent.parent / "docs" / "configs" / "llama-3.1-8b.json"
    with pytest.raises(ConfigError, match=message):
        command(SYNTHETIC, *(str(config) if flag == "CONFIG" else flag for flag in flags.split()))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "model.json: "), ('{"model_type": "mamba"}', "every page|mamba")],
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eviction fifo", "eviction must be one of lru, lfu, priority, not 'fifo'"),
        ("--write-policy never", "write policy must be one of write_through,"),
    ],
)
def test_unknown_policies_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command(SYNTHETIC, *flags.split())


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
    config = Path(__file__).parent.parent / "docs" / "configs" / "llama-3.1-8b.json"
    trace = write(tmp_path / "t.jsonl", [[1, 2, 3, 4], [1, 2, 3, 4]])
    for flags in ([], ["--model", config]):  # 512 tokens are 64 MiB
        command(trace, "--plot", tmp_path / "plot.svg", *flags)
    (pages, in_pages), (gib, in_gib) = drawn
    assert (in_pages, in_gib) == ("pages", "GiB")
    assert pages[0] == plot.Line("lru", [1, 2, 4], [1 / 8, 2 / 8, 4 / 8])
    assert gib[0] == plot.Line("lru", [1 / 16, 2 / 16, 4 / 16], pages[0].ratios)
