"""``kvkeep sizes``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sizes(
    configs: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG...", help="config.json files, or directories that hold one."
        ),
    ],
    page_size: Annotated[int, typer.Option(help="Tokens per page.", min=1)] = 64,
    kv_cache_dtype: Annotated[str, typer.Option(help="Of keys and values.")] = "bfloat16",
    markdown: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False,
) -> None:
    """Tell what models keep per page, from their configs: targets, and EAGLE-3 drafts."""
    from ..models.state_sizes import as_markdown, rows, show

    (as_markdown if markdown else show)(list(rows(configs, page_size, kv_cache_dtype)))
