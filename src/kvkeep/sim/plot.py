"""Charts of hit ratio against capacity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..chart import chart


class Line(NamedTuple):
    """The line of one replayed policy."""

    label: str
    capacities: Sequence[float]  # of the device, in the chart's unit
    ratios: Sequence[float]  # hits per page at each capacity


def draw(file: Path, lines: Sequence[Line], unit: str) -> None:
    """Draw hit ratio against device capacity in ``unit``; raises as :func:`~kvkeep.chart.chart`."""
    with chart(file) as axes:
        for line in lines:
            axes.plot(line.capacities, line.ratios, marker="o", markersize=4, label=line.label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, _: f"{size:,.10g}")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:.0%}")
        axes.set_xlabel(f"device capacity ({unit})")
        axes.set_ylabel("pages hit")
        axes.legend(frameon=False)
