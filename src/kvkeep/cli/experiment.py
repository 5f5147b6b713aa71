"""``kvkeep bench experiment``: whole experiments on the demo's models, servers included."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True)

Quick = Annotated[
    bool, typer.Option("--quick", help="Tiny sizes: shows that it runs, measures nothing.")
]
Json = Annotated[
    Path | None, typer.Option(help="Write all figures, settings and the machine to this file.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the figures.")]


@app.callback()
def experiment() -> None:
    """Repeat published experiments on the demo's models; docs/experiments.md describes them.

    Each starts its servers on free ports of 127.0.0.1, prints what it measured and whether each
    claim holds, and exits with 1 if one does not.
    """


@app.command()
def outputs(
    prompts: Annotated[int, typer.Option(help="Prompts to ask.", min=1)] = 200,
    output_length: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 128,
    concurrency: Annotated[int, typer.Option(help="Requests that run at a time.", min=1)] = 8,
    quick: Quick = False,
    json: Json = None,
) -> None:
    """Compare greedy outputs with the cache off with those from each tier, over HTTP."""
    from ..bench.experiments.same_outputs import Questions, run
    from ..bench.serving.running import Outputs

    asked = (4, 16, 2) if quick else (prompts, output_length, concurrency)
    questions = Questions(prompts=asked[0], output_length=asked[1], concurrency=asked[2])
    _end(run(questions, Outputs(json)))


def _end(held: bool) -> None:
    """Exit with 1 if a claim does not hold."""
    if not held:
        raise typer.Exit(1)
