"""Charts of what was measured; all raise as :func:`~kvkeep.chart.chart`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..chart import chart, need_matplotlib
from ..output import writable
from ..schema import ConfigError
from .measure import Row


def drawable(file: Path) -> None:
    """Raise ConfigError, before any work is done, unless a chart can be drawn there."""
    need_matplotlib()
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if file.suffix and file.suffix[1:].lower() not in known:
        raise ConfigError(f"cannot draw a chart as {file.suffix[1:]!r}: try {', '.join(known)}")
    writable(file)


def draw_ratios(file: Path, rows: Sequence[Row]) -> None:
    """A bar per row that has a peer, on a logarithmic axis: left of 1, ours is the better. Of rates
    that is peer / ours, as if it were the time that each takes."""
    bars = [
        (f"{row['name']} / {row['peer']}", 1 / ratio if row["unit"].endswith("/s") else ratio)
        for row in rows
        if (ratio := row["ratio"])
    ]
    with chart(file, 9, 1 + 0.2 * len(bars)) as axes:
        for at, (_, ratio) in enumerate(bars):
            axes.plot([1, ratio], [at, at], linewidth=5, solid_capstyle="butt", color="tab:blue")
        axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_xlabel("ours / peer, of what it takes: left of 1 is better")


def draw_first_token(file: Path, rows: Sequence[Row]) -> None:
    """Milliseconds to the first token against tokens of the prompt.

    Args:
        rows: those that say their tokens; a line for each kind of hit, and one for its peer.
    """
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["unit"] == "ms" and row["peer"] and row["peer_value"] is not None:
            tokens = row["tokens"]
            kind = row["name"].removeprefix(f"{tokens} tokens ")
            lines.setdefault(kind, {})[tokens] = row["ours"]
            lines.setdefault(row["peer"], {})[tokens] = row["peer_value"]
    with chart(file) as axes:
        for label, line in lines.items():
            axes.plot(list(line), list(line.values()), marker="o", label=label)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel("time to first token (ms)")
        axes.legend(frameon=False)
