"""The bench room: what rows say, that sides do the same, and that it runs. No time is judged."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from io import StringIO
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvkeep import cli
from kvkeep.bench import commits, files, measure, plot, residents, tree
from kvkeep.bench.index import Ours
from kvkeep.bench.load import GROUPS, make_load
from kvkeep.bench.measure import Row, Samples, Step, Tell
from kvkeep.bench.parts import PARTS, Setting, core
from kvkeep.bench.run import WIDTH, as_table, run
from kvkeep.schema import ConfigError, StoreError

PAGE = 16


def bench(*arguments: object) -> str:
    result = CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


# --- rows


def test_a_row_has_medians_and_their_ratio() -> None:
    samples = Samples()
    samples.taken("ours", "turn").extend([1e-6, 2e-6, 9e-6])
    samples.taken("theirs", "turn").extend([4e-6] * 99 + [8e-6])
    (row,) = samples.rows("8k", "ours", ["theirs"])
    assert (row["name"], row["unit"], row["peer"]) == ("8k turn", "us", "theirs")
    assert row["ours"] == pytest.approx(2)
    assert row["peer_value"] == pytest.approx(4)
    assert row["ratio"] == pytest.approx(0.5)
    assert row["ours_p99"] == pytest.approx(8.86)
    (row,) = samples.rows("8k", "ours", [])
    assert (row["peer"], row["ratio"]) == (None, None)


def test_time_is_taken_of_the_step_and_of_each_run() -> None:
    samples, ran = Samples(), []
    for i in range(3):
        samples.time("ours", "turn", partial(ran.append, i))
    assert ran == [0, 1, 2]
    assert len(samples.taken("ours", "turn")) == 3


# --- our side of the tree's benchmark


def test_sequences_share_their_first_half_with_their_group() -> None:
    load = make_load(GROUPS + 2, 64, PAGE)
    assert (load.tokens[0, :32] == load.tokens[GROUPS, :32]).all()
    assert (load.tokens[0, 32:] != load.tokens[GROUPS, 32:]).any()
    assert (load.tokens[0, :32] != load.tokens[1, :32]).any()
    assert (make_load(GROUPS + 2, 64, PAGE).tokens == load.tokens).all()


@pytest.mark.parametrize("groups", [1, 4])
def test_what_was_indexed_is_found_and_what_was_evicted_is_gone(groups: int) -> None:
    load = make_load(GROUPS + 1, 256, PAGE)
    side = Ours(load, groups)
    assert side.begin(0) == 0
    side.extend(0, 128)()
    side.extend(0, 256)()
    assert side.begin(0) == 256
    assert side.begin(GROUPS) == 128
    side.extend(GROUPS, 256)()
    assert side.resident() == 16 + 8
    assert len(side.match(0)()) == 16
    assert len(side.match_list(0)()) == 16
    side.evict(8)()
    assert side.resident() == 16
    assert side.begin(0) == 128


@pytest.mark.parametrize("built", tree.BUILT)
def test_a_life_fills_evicts_fills_again_and_evicts(built: str) -> None:
    load = make_load(24, 2048, PAGE)
    side, names = Ours(load), dict[str, int]()

    def note(name: str, step: Step) -> None:
        names[name] = names.get(name, 0) + 1
        step()

    tree.live(side, load, built, note)
    growing = {"insert"} if built == "whole" else {"commit a chunk", "commit a page"}
    matching = {"match", "match to slots", "match a list", "evict 64", "evict half"}
    assert names.keys() == growing | {f"{name} ({built})" for name in matching}
    assert names[f"match ({built})"] == 24
    assert 0 < side.resident() <= load.pages // 2
    side._residency.check()


# --- full caches


def test_matches_are_of_recent_sequences_and_of_any_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matched: list[tuple[int, int]] = []  # which, and pages that were found

    class Noted(Ours):
        def match(self, i: int) -> Step:
            step = super().match(i)

            def noted() -> int:
                matched.append((i, len(step())))
                return matched[-1][1]

            return noted

    monkeypatch.setattr(residents, "Ours", Noted)
    held = 40
    rows = residents.measure_times([held * 128, 60 * 128], 2, lambda _: None)
    names = [row["name"].partition(": ")[2] for row in rows]
    assert names[:2] == ["match, any", "match, recent"]
    assert names.count("match, any") == names.count("match, recent") == 3  # one beside the first
    assert {pages for _, pages in matched} == {128}
    first = [i for i, _ in matched[: residents.BURST]]
    assert min(first) < held - 1 - residents.RECENT
    assert set(first) == set(range(held - 1))


# --- charts


def test_bars_are_left_of_1_where_ours_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    axes = MagicMock()
    monkeypatch.setattr(plot, "chart", lambda *_: nullcontext(axes))
    faster = [
        measure.row("turn", 1.0, "ms", "theirs", 2.0),
        measure.row("decode", 20.0, "tokens/s", "theirs", 10.0),
    ]
    plot.draw_ratios(Path("chart.svg"), faster)
    assert [call.args[0] for call in axes.plot.call_args_list] == [[1, 0.5], [1, 0.5]]


# --- stores


def test_a_store_that_reads_other_bytes_is_no_peer(tmp_path: Path) -> None:
    class Forgetful(files.Plain):
        def read(self, first: int, out: files.Bodies) -> Step:
            return lambda: None

    peers = {"forgetful": Forgetful}
    with pytest.raises(StoreError, match="forgetful read other bytes"):
        files.measure(8192, files.BATCH * 8192, peers, 1, lambda _: None, tmp_path)


def test_files_lie_where_they_are_to(tmp_path: Path) -> None:
    found = set[Path]()

    class Seen(files.Plain):
        def __init__(self, directory: Path, size: int) -> None:
            found.update(directory.parents)
            super().__init__(directory, size)

    files.measure(8192, files.BATCH * 8192, {"seen": Seen}, 1, lambda _: None, tmp_path)
    assert tmp_path in found
    assert not list(tmp_path.iterdir())


SHM = Path("/dev/shm")


@pytest.mark.skipif(not SHM.is_mount(), reason="there is no file system in memory")
def test_no_read_is_cold_of_files_that_are_in_memory() -> None:
    assert files.in_memory(SHM)
    assert not files.in_memory(Path("/proc"))
    rows = files.measure(8192, files.BATCH * 8192, {}, 1, lambda _: None, SHM)
    assert [row["name"].rpartition(": ")[2] for row in rows] == ["write", "read, warm"]
    assert f"Cold reads left out: {SHM} is in memory" in bench("files", "--quick", "--dir", SHM)


def test_plain_io_moves_all_bytes(tmp_path: Path) -> None:
    bodies = np.random.default_rng(0).integers(256, size=(40, 65536), dtype=np.uint8)
    side, out = files.Plain(tmp_path, 65536), np.zeros_like(bodies[:24])
    side.write(0, [memoryview(body) for body in bodies])()
    side.read(16, [memoryview(body) for body in out])()
    assert (out == bodies[16:]).all()
    side.close()


# --- another commit

COMMIT = """
import os
from pathlib import Path
from typing import NamedTuple

class Setting(NamedTuple):
    repeats: int
    quick: bool
    directory: Path | None

def measure(setting, tell):
    side = Path(__file__).parents[3]
    print("this is no answer")
    for step in range(STEPS):
        tell(f"step {step}")
        with open(side.parent / "order", "a") as file:
            file.write(f"{side.name}{step} ")
    global turn
    turn += 1
    row = {"unit": "us", "peer": None}
    here = row | {"name": "insert", "ours": COST * turn, "ours_p99": 9.0 * COST}
    return [here, row | {"name": NAME, "ours": 1.0}]

turn, PARTS = 0, {"tree8k": measure}
"""


def checkout(place: Path, steps: int, cost: float, name: str) -> Path:
    """What :mod:`kvkeep.bench.worker` asks of a commit, with a benchmark that it invents."""
    room = place / "src/kvkeep/bench"
    room.mkdir(parents=True)
    for package in (room, room.parent):
        (package / "__init__.py").touch()
    constants = f"STEPS, COST, NAME = {steps}, {cost}, {name!r}"
    (room / "parts.py").write_text(constants + COMMIT)
    (room / "machine.py").write_text(f"def machine(): return {{'commit': {place.name!r}}}")
    return place


def test_two_commits_take_turns_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "HERE", checkout(tmp_path / "new", 3, 1.0, "ours alone"))
    old = checkout(tmp_path / "old", 2, 4.0, "theirs alone")
    first, second = commits.measure(old, "tree8k", Setting(repeats=3), lambda _: None)
    turn = "new0 old0 new1 old1 new2 "
    assert (tmp_path / "order").read_text() == 3 * turn
    assert first == measure.row("insert", 2.0, "us", "kvkeep old", 8.0) | {
        "ours_p99": 9.0,
        "peer_p99": 36.0,
    }
    assert second == measure.row("ours alone", 1.0, "us")


def test_a_checkout_that_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "HERE", checkout(tmp_path / "new", 1, 1.0, ""))
    with pytest.raises(ConfigError, match="is not a source checkout of kvkeep"):
        bench("tree8k", "--peer-kvkeep", tmp_path)
    old = checkout(tmp_path / "old", 1, 1.0, "")
    with pytest.raises(ConfigError, match="leave out other peers"):
        bench("tree8k", "--peer-kvkeep", old, "--peer-vllm")
    (old / "src/kvkeep/bench/machine.py").unlink()
    with pytest.raises(ConfigError, match=r"kvkeep in .*old cannot measure 'tree8k'"):
        bench("tree8k", "--peer-kvkeep", old)


def test_this_commit_beside_itself(tmp_path: Path) -> None:
    root, file = Path(__file__).parents[1], tmp_path / "rows.json"
    output = bench("calls", "--quick", "--repeats", 1, "--peer-kvkeep", root, "--json", file)
    found = json.loads(file.read_text())
    (rows,) = found["parts"].values()
    assert {row["peer"] for row in rows} == {f"kvkeep {found['machine']['commit']}"}
    assert "left out" not in output


# --- the command


def test_core_runs_and_tells(tmp_path: Path) -> None:
    file, chart = tmp_path / "rows.json", tmp_path / "chart.svg"
    output = bench("core", "--quick", "--repeats", 1, "--json", file, "--plot", chart)
    found = json.loads(file.read_text())
    assert {"cpu", "cores", "memory_gib", "python", "torch", "commit"} <= found["machine"].keys()
    assert tuple(found["parts"]) == core(quick=True)
    for part, rows in found["parts"].items():
        assert part in output
        assert rows
        for row in rows:
            assert {"name", "ours", "unit", "peer", "peer_value", "ratio"} <= row.keys()
            assert row["ours"] > 0
            if row["peer"] is not None:
                assert row["ratio"] == pytest.approx(row["ours"] / row["peer_value"])
    assert "svg" in chart.read_text()[:500]
    assert "left out, for want of --peer-sglang DIR and --peer-vllm" in output


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_where_nothing_can_be_written_nothing_is_measured(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PARTS, "tree8k", lambda setting, tell: pytest.fail("measured"))
    with pytest.raises(ConfigError, match="cannot write"):
        bench("tree8k", option, tmp_path / "none" / "x.svg")
    with pytest.raises(ConfigError, match="cannot write"):
        bench("files", "--dir", tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot draw a chart as 'json'"):
        bench("tree8k", "--plot", tmp_path / "x.json")


def test_a_run_that_breaks_keeps_the_rows_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(setting: Setting, tell: Tell) -> list[Row]:
        raise KeyboardInterrupt

    monkeypatch.setitem(PARTS, "tree8k", lambda setting, tell: [measure.row("match", 1.0, "us")])
    monkeypatch.setitem(PARTS, "calls", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(["tree8k", "calls"], Setting(), tmp_path / "rows.json")
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in found["parts"]["tree8k"]] == ["match"]


@pytest.mark.parametrize("width", [WIDTH, 110, 160])
def test_a_table_folds_names_and_never_figures(width: int) -> None:
    names = ("prefill and 64 tokens, batch 32, padded", "model without attention + attention alone")
    one = measure.row(names[0], 1_234_567.0, "tokens/s", names[1], 7_654_321.0)
    one["ours_p99"], one["peer_p99"] = 2_345_678.0, 8_765_432.0
    console = Console(width=width, file=StringIO())
    console.print(as_table("decode", [one]))
    found = console.file.getvalue()
    assert max(map(len, found.splitlines())) <= width
    assert "…" not in found
    for figure in ("1,234,567", "2,345,678", "tokens/s", "7,654,321", "8,765,432", "0.16"):
        assert found.count(figure) == 1


def test_a_part_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot bench 'speed'; there are core, tree8k"):
        bench("speed")
    assert set(core(quick=False)) < set(PARTS)


def test_trees_of_one_tiny_size_are_measured_once() -> None:
    trees = [part for part in core(quick=False) if part.startswith("tree")]
    assert len(trees) == 3
    assert set(core(quick=False)) - set(core(quick=True)) == set(trees[1:])


def test_a_peer_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    path = list(sys.path)
    with pytest.raises(ConfigError, match=r"SGLang in .* cannot be imported"):
        bench("tree8k", "--quick", "--peer-sglang", tmp_path)
    with pytest.raises(ConfigError, match="vLLM cannot be imported"):
        bench("tree8k", "--quick", "--peer-vllm")
    assert sys.path == path
