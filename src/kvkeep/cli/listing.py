"""Help that shows whole names on a narrow screen."""

from __future__ import annotations

from shutil import get_terminal_size
from typing import Any

from typer.core import TyperCommand

_WIDE = 140  # columns that panels need to show every name


class Listing(TyperCommand):
    """Lists options without panels on a narrow screen, where panels cut long names."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if get_terminal_size().columns < _WIDE:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)
