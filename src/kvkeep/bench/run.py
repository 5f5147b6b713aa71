"""What ``kvkeep bench`` does: measure parts, print a table each, write JSON and a plot."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..chart import need_matplotlib
from ..schema import ConfigError
from .measure import Row
from .parts import CORE, PARTS, Setting
from .plot import draw_first_token, draw_ratios

WIDTH = 110  # columns of a table; narrower ones lose figures


def run(
    names: Sequence[str], setting: Setting, json: Path | None = None, plot: Path | None = None
) -> None:
    """Measure the parts of these names; "core" is all of the cache's own.

    Args:
        json: where the rows go, with the machine and the commit.
        plot: where a chart of the ratios goes; one of times to first token goes beside it.

    Raises:
        ConfigError: a part is not known, a peer cannot be imported, or matplotlib is missing.
    """
    parts = list(
        dict.fromkeys(part for name in names for part in (CORE if name == "core" else [name]))
    )
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"cannot bench {unknown[0]!r}; there are core, {', '.join(PARTS)}")
    if plot is not None:
        need_matplotlib()
    console = Console()
    console.width = max(console.width, WIDTH)
    measured: dict[str, list[Row]] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        for part in parts:
            rows = PARTS[part](setting, lambda now: progress.update(task, description=now))
            measured[part] = rows
            console.print(_table(part, rows))
    peers = {"--peer-sglang DIR": setting.sglang, "--peer-vllm": setting.vllm}
    if absent := [flag for flag, peer in peers.items() if not peer]:
        console.print(f"Peers left out, for want of {' and '.join(absent)}.")
    if json is not None:
        figures = {"machine": machine(), "parts": measured}
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
    if plot is not None:
        everything = [row for rows in measured.values() for row in rows]
        draw_ratios(plot, everything)
        if timed := [row for row in everything if "tokens" in row]:
            draw_first_token(plot.with_stem(f"{plot.stem}-ttft"), timed)


def machine() -> dict[str, str | int]:
    """What the figures depend on: processor, memory, versions, and the commit of this code."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages * page / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": version("torch"),
        "commit": commit.stdout.strip() or "unknown",
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")


def _table(title: str, rows: list[Row]) -> Table:
    table = Table(title=title, box=None, title_justify="left")
    for name in ("", "ours", "p99", "unit", "peer", "theirs", "p99", "ratio"):
        left = name in ("", "unit", "peer")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    above = ""
    for row in rows:
        mine = [row["name"], *map(_figure, (row["ours"], row.get("ours_p99"))), row["unit"]]
        theirs = map(_figure, (row["peer_value"], row.get("peer_p99"), row["ratio"]))
        table.add_row(*(mine if row["name"] != above else [""] * 4), row["peer"], *theirs)
        above = row["name"]
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
