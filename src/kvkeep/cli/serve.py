"""``kvkeep serve``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..settings import Setting


def options() -> tuple[Setting, ...]:
    """All settings of a server."""
    from ..server.config import ServerConfig
    from ..settings import settings_of

    return settings_of(ServerConfig)


def serve(
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="Directory of the model, in Hugging Face layout."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Read settings from this .toml or .yaml file. Its keys are options without the "
            "dashes in front, such as page-size: 32; options given here override it.",
        ),
    ] = None,
    **said: Any,
) -> None:
    """Serve a model with an OpenAI-compatible API. Flags are named as in SGLang."""
    from ..server.config import ServerConfig
    from ..server.run import serve
    from ..settings import make
    from .options import chosen

    model = {"model": directory} if directory else {}
    serve(make(ServerConfig, chosen(options(), said | model, config)))
