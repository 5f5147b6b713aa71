"""``kvkeep replay``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..settings import Setting


def options() -> tuple[Setting, ...]:
    """The settings of a policy that a replay can tell the effect of."""
    from ..core.policy import Policy
    from ..settings import settings_of

    return tuple(x for x in settings_of(Policy) if x.name in ("eviction", "write", "write_hits"))


def pages(text: str) -> int | None:
    """A number of pages; None for "inf"."""
    if text == "inf":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither a number of pages, 1 or more, nor inf")
    return int(text)


def replay(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Traces: .jsonl, .jsonl.xz.")
    ],
    device_pages: Annotated[
        str | None,
        typer.Option(help="Pages that the device holds; inf, the default: all.", metavar="N|inf"),
    ] = None,
    host_pages: Annotated[
        int | None, typer.Option(help="Pages that the host holds. Default: none.", min=0)
    ] = None,
    storage_pages: Annotated[
        int | None, typer.Option(help="Pages that storage holds. Default: none.", min=0)
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Replay all files as one stream, in this order.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the figures to this file.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw hits against device pages, for every eviction order."),
    ] = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            help="Plan for this model, a config.json: answers are in prefill tokens, too, and sizes"
            " may be in GiB. Once more for its EAGLE-3 draft.",
            metavar="CONFIG",
        ),
    ] = None,
    gib: Annotated[
        tuple[float, float, float] | None,
        typer.Option(
            help="With --model: sizes of the tiers, in place of --*-pages.",
            metavar="DEVICE HOST STORAGE",
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(help="With --model: tokens of a block. Default: as the trace tells.", min=1),
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="With --model.")] = "bfloat16",
    **said: Any,
) -> None:
    """Tell what would be hit: replay traces on the real cache, without a model or any bytes.

    A page is a block of the trace. Each file has a cache of its own, unless --together.

    To plan capacity: kvkeep replay TRACE --model config.json --gib 40 200 2000
    """
    from ..core.policy import Policy
    from ..schema import ConfigError
    from ..settings import make
    from ..sim.plan import read_plan
    from ..sim.replay import Capacity
    from ..sim.run import run
    from ..sim.traces import read_trace, tokens_per_block
    from .options import chosen

    capacity = Capacity(pages(device_pages or "inf"), host_pages or 0, storage_pages or 0)
    policy = make(Policy, chosen(options(), said))
    if gib and (device_pages, host_pages, storage_pages) != (None, None, None):
        raise ConfigError("sizes are in pages or in GiB: leave out --gib or --*-pages")
    if gib and not model:
        raise ConfigError("--gib wants --model CONFIG, which tells how large a page is")
    streams = [read_trace(files) for files in ([traces] if together else [[f] for f in traces])]
    plan = None
    if model:
        plan = read_plan(model, tokens_per_block(streams, block_tokens), kv_cache_dtype)
        capacity = plan.capacity(*gib) if gib else capacity
    run(streams, capacity, policy, json, plot, plan)
