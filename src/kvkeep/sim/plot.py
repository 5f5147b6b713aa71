"""Charts of replays. matplotlib is an extra: ``pip install 'kvkeep[plot]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..schema import ConfigError


class Line(NamedTuple):
    """One replayed policy."""

    label: str
    capacities: Sequence[int]  # device pages
    ratios: Sequence[float]  # hits per page, at each


def need_matplotlib() -> None:
    """Raise ConfigError, before any work is done, unless it is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'kvkeep[plot]'") from None


def draw(file: Path, lines: Sequence[Line]) -> None:
    """Hit ratio against capacity.

    Args:
        file: where to; its suffix says the format (.svg, .png, .pdf).

    Raises:
        ConfigError: the format is not known, or the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, nothing global

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        axes.plot(line.capacities, line.ratios, marker="o", markersize=4, label=line.label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:.0%}")
    axes.set_xlabel("device capacity (pages)")
    axes.set_ylabel("pages hit")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot: {error}") from error
