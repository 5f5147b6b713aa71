"""The command ``kvkeep replay``: replays traces, prints a table, writes JSON and a plot."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from ..chart import need_matplotlib
from ..core.policy import EVICTION, Policy, priority
from ..engine.config import GIB
from ..output import writable, write_json
from .plan import Answers, Plan
from .plot import Line, draw
from .replay import TIERS, Capacity, Hits, Result, replay
from .traces import Trace

MIB = 1 << 20
_STEPS = 8  # capacities in a plot, each half of the next one
_WIDTH = 80  # columns of the table at least; a narrower table would cut figures


def run(
    traces: Sequence[Trace],
    capacity: Capacity,
    policy: Policy,
    json: Path | None = None,
    plot: Path | None = None,
    plan: Plan | None = None,
) -> None:
    """Replay each trace on a cache of its own.

    Args:
        json: file for the figures: the sums of all traces, and of several also "traces" by name.
        plot: file for a chart of hits against device pages, with a line per eviction order.
        plan: the size of a page, to report tokens and GiB, too; the chart is then in GiB.

    Raises:
        ConfigError: tiers do not fit together, a file cannot be written, or matplotlib is missing.
    """
    if plot is not None:
        need_matplotlib()
    for file in filter(None, (json, plot)):
        writable(file)
    sweeps = [_sweep(trace, capacity, policy) if plot else {} for trace in traces]
    runs = [1 + sum(map(len, sweep.values())) for sweep in sweeps]
    measure: Callable[[int], float] = plan.gib if plan else float
    with _progress() as progress:
        total = sum(len(trace) * count for trace, count in zip(traces, runs, strict=True))
        tell = functools.partial(progress.advance, progress.add_task("replaying", total=total))
        done = [_replay(trace, capacity, policy, tell) for trace in traces]
        lines = [
            Line(
                f"{trace.name}, {name}" if len(traces) > 1 else name,
                [measure(size.device or 0) for size, _ in sweep[name]],
                [_replay(trace, size, policy, tell)[0].ratio for size, policy in sweep[name]],
            )
            for trace, sweep in zip(traces, sweeps, strict=True)
            for name in sweep
        ]
    results = {trace.name: result for trace, (result, _) in zip(traces, done, strict=True)}
    everything = functools.reduce(operator.add, (result for result, _ in done))
    _show(results if len(traces) == 1 else results | {"all": everything}, capacity)
    figures = dataclasses.asdict(everything)
    if len(traces) > 1:
        figures["traces"] = {name: dataclasses.asdict(one) for name, one in results.items()}
    if plan:
        parts = (plan.answers(trace, *told) for trace, told in zip(traces, done, strict=True))
        answers = functools.reduce(operator.add, parts)
        _show_plan(plan, answers)
        sizes = {"page_tokens": plan.page_tokens, "page_bytes": plan.page_bytes}
        figures["plan"] = sizes | dataclasses.asdict(answers)
    if json is not None:
        write_json(json, figures)
    if plot is not None:
        draw(plot, lines, "GiB" if plan else "pages")


def _replay(
    trace: Trace, capacity: Capacity, policy: Policy, tell: Callable[[], None]
) -> tuple[Result, list[Hits]]:
    """Replay one trace; return its counts and the hits of each request."""
    hits: list[Hits] = []

    def heard(one: Hits) -> None:
        hits.append(one)
        tell()

    return replay(trace, capacity, policy, heard), hits


def _sweep(
    trace: Trace, capacity: Capacity, policy: Policy
) -> dict[str, list[tuple[Capacity, Policy]]]:
    """By eviction order, the replays of its line: smaller and smaller devices, all else equal."""
    sizes = sorted({max(1, trace.distinct >> step) for step in range(_STEPS)})
    sized = [dataclasses.replace(capacity, device=size) for size in sizes]
    return {
        name: [(size, dataclasses.replace(policy, eviction=name)) for size in sized]
        for name, order in EVICTION.items()
        if order is not priority or any(trace.priorities)
    }


def _progress() -> Progress:
    parts = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*parts, console=Console(stderr=True), transient=True)


def _show(results: Mapping[str, Result], capacity: Capacity) -> None:
    """Print for each name a row per tier that holds pages, and one for the total."""
    table = Table(Column("trace", overflow="fold"), box=None)
    for name in ("requests", "pages", "tier", "hits", "ratio", "evicted"):
        table.add_column(name, justify="left" if name == "tier" else "right", no_wrap=True)
    tiers = [tier for tier in TIERS if getattr(capacity, tier) != 0]
    for name, result in results.items():
        above = (name, f"{result.requests:,}", f"{result.pages:,}")
        for tier in (*tiers, "total"):
            hits = result.hits[tier]
            evicted = f"{result.evictions[tier]:,}" if tier in tiers else ""
            shown = (tier, f"{hits:,}", f"{hits / max(1, result.pages):.2%}", evicted)
            table.add_row(*(Text(cell) for cell in (*above, *shown)))
            above = ("", "", "")
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table)


def _show_plan(plan: Plan, answers: Answers) -> None:
    """Print the tokens that hits save, the size of a page, and the bytes that move."""
    console = Console(soft_wrap=True)
    console.print(f"saved {answers.saved_tokens:,} of {answers.prompt_tokens:,} prefill tokens")
    sizes = (f"{tier} {size / MIB:,.2f}" for tier, size in plan.page_bytes.items())
    console.print(f"a page is {plan.page_tokens} tokens; in MiB: {', '.join(sizes)}")
    moved = [f"{lane} {size / GIB:,.1f}" for lane, size in answers.moved_bytes.items() if size]
    console.print(f"moved, in GiB: {', '.join(moved) or 0}")
