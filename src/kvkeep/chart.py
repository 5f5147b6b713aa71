"""Charts. matplotlib is an extra: ``pip install 'kvkeep[plot]'``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .schema import ConfigError


def need_matplotlib() -> None:
    """Raise ConfigError, before any work is done, unless it is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'kvkeep[plot]'") from None


@contextmanager
def chart(file: Path, width: float = 7, height: float = 4.5) -> Iterator[Any]:
    """Axes to draw on, of so many inches; they are written when the block ends.

    Args:
        file: where to; its suffix says the format (.svg, .png, .pdf).

    Raises:
        ConfigError: the format is not known, or the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, nothing global

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.grid(alpha=0.3)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot: {error}") from error
