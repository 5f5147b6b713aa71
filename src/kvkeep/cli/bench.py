"""``kvkeep bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def bench(
    parts: Annotated[
        list[str],
        typer.Argument(
            metavar="PART...",
            help="core: all of the cache's own, which is tree8k, tree32k, tree131k, calls, "
            "residents, memory, copies, files. Or decode, engine: the engine on it.",
        ),
    ],
    peer_sglang: Annotated[
        Path | None,
        typer.Option(help="Compare with SGLang, imported from this directory.", metavar="DIR"),
    ] = None,
    peer_vllm: Annotated[bool, typer.Option("--peer-vllm", help="With installed vLLM.")] = False,
    peer_kvkeep: Annotated[
        Path | None,
        typer.Option(help="Compare with another commit, checked out there.", metavar="DIR"),
    ] = None,
    directory: Annotated[Path | None, typer.Option("--dir", help="To write files in.")] = None,
    repeats: Annotated[int, typer.Option(help="Turns of each side.", min=1)] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows that it runs, measures nothing.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(help="Also write the rows to this file, and the machine.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the ratios.")] = None,
) -> None:
    """Measure the cache's parts, beside what others do for the same.

    Sides take turns in one process; a row has the median of each and its 99th percentile. ratio is
    ours / theirs: of times, below 1 is faster; of rates, above. docs/bench.md tells what is timed.
    """
    from ..bench.parts import Setting
    from ..bench.run import run

    setting = Setting(repeats, quick, peer_sglang, peer_vllm, directory, peer_kvkeep)
    run(parts, setting, json, plot)
