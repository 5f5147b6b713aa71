"""What ``kvkeep bench`` does: measure parts, print a table each, write JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from rich.console import Console, JustifyMethod
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..output import writable, write_json
from ..schema import ConfigError
from . import commits
from .files import in_memory
from .machine import machine
from .measure import Row
from .parts import PARTS, Setting, core
from .plot import draw_first_token, draw_ratios, drawable

WIDTH = 80  # columns of a table; in fewer, figures would not fit


def run(
    names: Sequence[str], setting: Setting, json: Path | None = None, plot: Path | None = None
) -> None:
    """Measure the parts of these names; "core" is all of the cache's own.

    Args:
        json: where the rows go, with the machine and the commit, after each part.
        plot: where a chart of the ratios goes; one of times to first token goes beside it.

    Raises:
        ConfigError: a part is not known, a file cannot be written, a peer cannot be imported, or
            matplotlib is missing.
    """
    cores = core(setting.quick)
    parts = list(
        dict.fromkeys(part for name in names for part in (cores if name == "core" else [name]))
    )
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"cannot bench {unknown[0]!r}; there are core, {', '.join(PARTS)}")
    other = setting.kvkeep
    if other is not None and (setting.sglang or setting.vllm):
        raise ConfigError("another commit is compared alone: leave out other peers")
    where = setting.directory or Path(gettempdir())
    if "files" in parts:
        writable(where / "files")
    if json is not None:
        writable(json)
    if plot is not None:
        drawable(plot)
    console = Console()
    console.width = max(console.width, WIDTH)
    measured: dict[str, list[Row]] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        for part in parts:
            measure = PARTS[part] if other is None else partial(commits.measure, other, part)
            rows = measure(setting, lambda now: progress.update(task, description=now))
            measured[part] = rows
            console.print(as_table(part, rows))
            if json is not None:
                write_json(json, {"machine": machine(), "parts": measured})
    peers = {"--peer-sglang DIR": setting.sglang, "--peer-vllm": setting.vllm}
    absent = [flag for flag, peer in peers.items() if not peer]
    if absent and other is None:
        console.print(f"Peers left out, for want of {' and '.join(absent)}.")
    if "files" in parts and in_memory(where):
        console.print(f"Cold reads left out: {where} is in memory.", markup=False)
    if plot is not None:
        everything = [row for rows in measured.values() for row in rows]
        draw_ratios(plot, everything)
        if timed := [row for row in everything if "tokens" in row]:
            draw_first_token(plot.with_stem(f"{plot.stem}-ttft"), timed)


def as_table(title: str, rows: list[Row]) -> Table:
    """A line per row. Where they do not fit, names are folded, and figures are not."""
    table = Table(title=title, box=None, title_justify="left")
    for name in ("", "ours", "p99", "unit", "peer", "theirs", "p99", "ratio"):
        left, whole = name in ("", "unit", "peer"), name not in ("", "peer")
        justify: JustifyMethod = "left" if left else "right"
        table.add_column(name, justify=justify, no_wrap=whole, overflow="fold")
    above = ""
    for row in rows:
        mine = [row["name"], *map(_figure, (row["ours"], row.get("ours_p99"))), row["unit"]]
        theirs = map(_figure, (row["peer_value"], row.get("peer_p99"), row["ratio"]))
        table.add_row(*(mine if row["name"] != above else [""] * 4), row["peer"], *theirs)
        above = row["name"]
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
