"""Charts with matplotlib, an optional dependency: ``pip install 'kvkeep[plot]'``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .schema import ConfigError


def need_matplotlib() -> None:
    """Check before any work that matplotlib is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'kvkeep[plot]'") from None


@contextmanager
def chart(file: Path, width: float = 7, height: float = 4.5) -> Iterator[Any]:
    """Axes to draw on; leaving the block writes them to ``file``.

    Args:
        file: its suffix chooses the format (.svg, .png, .pdf).
        width: of the figure, in inches.
        height: of the figure, in inches.

    Raises:
        ConfigError: the format is unknown, or the file cannot be written.
    """
    with charts(file, 1, width, height) as (axes,):
        yield axes


@contextmanager
def charts(
    file: Path | IO[bytes], count: int, width: float, height: float, suffix: str | None = None
) -> Iterator[Sequence[Any]]:
    """``count`` axes side by side, as :func:`chart`.

    Args:
        suffix: the format, without a dot; None: as the file's name ends.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, nothing global

    figure = Figure(figsize=(width, height), layout="constrained")
    every = figure.subplots(1, count, squeeze=False)[0]
    yield every
    for axes in every:
        axes.grid(alpha=0.3)
    try:
        figure.savefig(file, format=suffix)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot: {error}") from error
