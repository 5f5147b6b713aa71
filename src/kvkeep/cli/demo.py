"""``kvkeep demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
) -> None:
    """Restore a prompt from each tier, with and without the draft's state, and compare.

    Exit code 1 if anything came out otherwise than it should.
    """
    from ..demo.run import run

    if not run(json):
        raise typer.Exit(1)
