"""A chart of times to first token. matplotlib is an extra: ``pip install 'kvkeep[plot]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..schema import ConfigError
from .engine import SLOWLY, STORED
from .measure import Row


def draw(file: Path, rows: Sequence[Row]) -> None:
    """Milliseconds against tokens of the prompt: computed, and back from storage.

    Args:
        file: where to; its suffix says the format (.svg, .png, .pdf).
        rows: of :func:`kvkeep.bench.engine.measure`; others are left out.

    Raises:
        ConfigError: the format is not known, or the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, nothing global

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind in (STORED, SLOWLY):
        mine = [row for row in rows if row["name"].endswith(f"tokens {kind}")]
        tokens = [row["tokens"] for row in mine]
        axes.plot(tokens, [row["ours"] for row in mine], marker="o", label=kind)
        if kind == STORED:
            axes.plot(
                tokens, [row["peer_value"] or 0.0 for row in mine], marker="o", label="computed"
            )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("time to first token (ms)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot: {error}") from error
