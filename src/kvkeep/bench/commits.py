"""Two commits of kvkeep side by side: what a change made faster or slower.

One interpreter cannot import two versions of a package, so each side has a process, which runs its
own checkout's benchmarks. Only one of them runs at a time: a step of the one, up to the next thing
it tells, and then a step of the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..schema import ConfigError
from . import worker
from .measure import Row, Tell, row
from .parts import Setting

HERE = Path(__file__).parents[3]  # this checkout

Turn = dict[str, Row]
"""Rows by name."""


def measure(checkout: Path, part: str, setting: Setting, tell: Tell) -> list[Row]:
    """A row of ours beside the other commit's for each that both have; ours alone for the rest.

    A figure is the median over all turns, and a ratio the median of the ratios of each turn: the
    sides' turns lie close together, so what slows the machine slows both.

    Args:
        checkout: a source checkout of the other commit.

    Raises:
        ConfigError: there is none, or one of the sides cannot measure the part.
    """
    if not (checkout / "src/kvkeep/bench/parts.py").is_file():
        raise ConfigError(f"{checkout} is not a source checkout of kvkeep")
    turns = list[tuple[Turn, Turn]]()
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(_side(source, part, setting)) for source in (HERE, checkout)
        )
        next(ours)
        peer = f"kvkeep {next(theirs)[1]['commit']}"
        for turn in range(setting.repeats):
            tell(f"{part}, turn {turn + 1} of {setting.repeats}")
            turns.append(_turn(ours, theirs))
    return [_beside(name, peer, turns) for name in turns[0][0]]


@contextmanager
def _side(source: Path, part: str, setting: Setting) -> Iterator[Iterator[tuple[str, Any]]]:
    """What the worker of a checkout answers; it runs only while the next answer is asked for."""
    arguments = (part, setting.quick, setting.directory and str(setting.directory.absolute()))
    command = (sys.executable, "-P", worker.__file__, json.dumps(arguments))
    path = {"PYTHONPATH": os.pathsep.join(_path(source))}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=os.environ | path, stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            failed = f"kvkeep in {source} cannot measure {part!r}"
            yield _answers(process.stdin, process.stdout, failed)
        finally:
            process.kill()  # it waits, or nobody waits for it


def _answers(orders: IO[str], answers: IO[str], failed: str) -> Iterator[tuple[str, Any]]:
    """Each lets the worker go on to the next."""
    while line := answers.readline():
        yield json.loads(line)
        orders.write("\n")
        orders.flush()
    raise ConfigError(failed)


def _path(source: Path) -> list[str]:
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [str(source.absolute() / "src"), *filter(None, known)]


def _turn(ours: Iterator[Any], theirs: Iterator[Any]) -> tuple[Turn, Turn]:
    """One turn of each side, step by step."""
    done = dict[int, Turn]()
    while len(done) < 2:
        for at, side in enumerate((ours, theirs)):
            if at not in done:
                kind, value = next(side)
                if kind == "rows":
                    done[at] = {one["name"]: one for one in value}
    return done[0], done[1]


def _beside(name: str, peer: str, turns: list[tuple[Turn, Turn]]) -> Row:
    """The row of this name, of all turns."""
    mine = [ours[name] for ours, _ in turns]
    other = [theirs[name] for _, theirs in turns if name in theirs]
    if len(other) < len(mine):
        return row(name, _median(mine, "ours"), mine[0]["unit"])
    found = row(name, _median(mine, "ours"), mine[0]["unit"], peer, _median(other, "ours"))
    pairs = zip(mine, other, strict=True)
    found["ratio"] = float(np.median([one["ours"] / another["ours"] for one, another in pairs]))
    if "ours_p99" in mine[0] and "ours_p99" in other[0]:
        found["ours_p99"], found["peer_p99"] = _median(mine, "ours_p99"), _median(other, "ours_p99")
    return found


def _median(rows: list[Row], figure: str) -> float:
    return float(np.median([one[figure] for one in rows]))  # type: ignore[literal-required]
