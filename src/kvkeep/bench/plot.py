"""A chart of ratios. matplotlib is an extra: ``pip install 'kvkeep[plot]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..schema import ConfigError
from ..sim.plot import need_matplotlib
from .measure import Row

__all__ = ["draw", "need_matplotlib"]


def draw(file: Path, rows: Sequence[Row]) -> None:
    """A bar per row that has a peer, on a logarithmic axis: left of 1, ours is the smaller.

    Args:
        file: where to; its suffix says the format (.svg, .png, .pdf).

    Raises:
        ConfigError: the format is not known, or the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, nothing global

    bars = [(f"{row['name']} / {row['peer']}", row["ratio"]) for row in rows if row["ratio"]]
    figure = Figure(figsize=(9, 1 + 0.2 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for at, (_, ratio) in enumerate(bars):
        axes.plot([1, ratio], [at, at], linewidth=5, solid_capstyle="butt", color="tab:blue")
    axes.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("ours / peer")
    axes.grid(alpha=0.3, axis="x")
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot: {error}") from error
