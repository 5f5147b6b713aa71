"""The ``kvkeep`` command, a file for each command or family of commands.

A command imports what takes long to import when it runs. Those of :data:`CONFIGURED` take options
from settings classes, which import NumPy, so their options are made when they are called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from . import bench, cache, demo, replay, serve, sizes
from .listing import Listing

if TYPE_CHECKING:
    from ..settings import Setting

CONFIGURED: dict[str, tuple[Callable[..., None], Callable[[], Sequence[Setting]]]] = {
    "serve": (serve.serve, serve.options),
    "replay": (replay.replay, replay.options),
}
"""Functions by command, with what lists the settings that each takes."""


class Commands(TyperGroup):
    """All commands; those of :data:`CONFIGURED` are completed when they are called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in CONFIGURED:
            from .options import WORDS, with_options

            function, options = CONFIGURED[args[0]]
            complete = typer.Typer(add_completion=False)
            complete.command(args[0], cls=Listing)(with_options(function, options()))
            ctx.meta[WORDS] = args[1:]
            self.add_command(typer.main.get_command(complete), args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="kvkeep",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    """Print the version and end, if ``wanted``."""
    if wanted:
        typer.echo(f"kvkeep {__version__}")
        raise typer.Exit


@app.callback()
def kvkeep(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
) -> None:
    """A hierarchical KV cache for LLM serving that keeps the draft model's state too."""


for name, (function, _) in CONFIGURED.items():
    app.command(name, help=inspect.getdoc(function))(lambda: None)
for family in (bench.app, cache.app):
    for command in family.registered_commands:
        command.cls = Listing
app.command()(demo.demo)
app.add_typer(bench.app, name="bench")
app.command()(sizes.sizes)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line. Errors of kvkeep's own are one line, not a traceback."""
    try:
        app()
    except Exception as error:
        from ..schema import KvkeepError

        if not isinstance(error, KvkeepError):
            raise
        sys.exit(f"kvkeep: {error}")
