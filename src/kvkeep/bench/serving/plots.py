"""Charts of runs, as data; drawn to a file or into a page."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...chart import charts

Run = dict[str, Any]
"""A run as its JSON has it."""

WIDTH, HEIGHT = 4.2, 3.6  # of a panel, in inches


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one label."""

    label: str
    xs: Sequence[float] | Sequence[str]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    x: str
    y: str
    lines: Sequence[Line]
    marker: str = ""  # of each point; empty: none


def draw(panels: Sequence[Panel], file: Path | io.BytesIO, suffix: str | None = None) -> None:
    """Draw ``panels`` side by side; without any, draw nothing.

    Args:
        suffix: the format; None: as the file's name ends.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not panels:
        return
    import matplotlib

    # Labels are names that users chose: no "$" of theirs starts a formula.
    with (
        matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False}),
        charts(file, len(panels), WIDTH * len(panels), HEIGHT, suffix) as every,
    ):
        for panel, axes in zip(panels, every, strict=True):
            for line in panel.lines:
                # a label that starts with "_" would be hidden
                axes.plot(line.xs, line.ys, marker=panel.marker, label=line.label.lstrip("_"))
            axes.set_xlabel(panel.x)
            axes.set_ylabel(panel.y)
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False, fontsize=8)


def svg(panels: Sequence[Panel]) -> str:
    """``panels`` as an SVG element, for a page; empty without any."""
    buffer = io.BytesIO()
    draw(panels, buffer, "svg")
    _, mark, rest = buffer.getvalue().decode().partition("<svg")
    return mark + rest


def serve_panels(runs: Sequence[tuple[str, Run]]) -> list[Panel]:
    """How TTFT, ITL and latency are spread, a line per labelled run."""
    names = {"ttft_ms": "TTFT (ms)", "itl_ms": "ITL (ms)", "e2e_latency_ms": "E2E latency (ms)"}
    return [
        Panel(title, "share of requests" if name != "itl_ms" else "share of gaps", lines)
        for name, title in names.items()
        if (lines := _spreads(name, [(label, run["quantiles"]) for label, run in runs]))
    ]


def multiturn_panels(runs: Sequence[tuple[str, Run]]) -> list[Panel]:
    """Hit rate, TTFT and throughput against the round, a line per labelled run."""
    names = {
        "hit_rate": "hit rate",
        "mean_ttft_ms": "mean TTFT (ms)",
        "output_throughput": "output tokens/s",
    }
    panels = []
    for name, title in names.items():
        lines = []
        for label, run in runs:
            told = [r for r in run["rounds"] if r[name] is not None]
            if told:
                lines.append(Line(label, [str(r["round"]) for r in told], [r[name] for r in told]))
        if lines:
            panels.append(Panel("round", title, lines, "o"))
    return panels


def gsm8k_panels(runs: Sequence[tuple[str, Run]]) -> list[Panel]:
    """Accuracy of each pass, and how its latencies are spread."""
    passes = [(f"{label}: {each['name']}", each) for label, run in runs for each in run["passes"]]
    accuracy = [
        Line(
            label, [each["name"] for each in run["passes"]], [p["accuracy"] for p in run["passes"]]
        )
        for label, run in runs
    ]
    lines = _spreads("e2e_latency_ms", [(label, each["quantiles"]) for label, each in passes])
    panels = [Panel("", "accuracy", accuracy, "o")]
    return [*panels, Panel("E2E latency (ms)", "share of requests", lines)] if lines else panels


def _spreads(name: str, runs: Sequence[tuple[str, dict[str, list[float]]]]) -> list[Line]:
    """The distribution function of a spread, by its quantiles."""
    return [
        Line(label, quantiles[name], [percent / 100 for percent in range(101)])
        for label, quantiles in runs
        if name in quantiles
    ]
