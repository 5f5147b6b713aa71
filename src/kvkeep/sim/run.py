"""What ``kvkeep replay`` does: replay traces, print a table, write JSON and a plot."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..chart import need_matplotlib
from ..policy import EVICTION, Policy, priority
from .plan import GIB, Answers, Plan
from .plot import Line, draw
from .replay import TIERS, Capacity, Result, replay
from .traces import Trace, read_trace

_STEPS = 8  # capacities in a plot, each half of the next


def run(
    files: Sequence[Path],
    capacity: Capacity,
    policy: Policy,
    together: bool = False,
    json: Path | None = None,
    plot: Path | None = None,
    plan: Plan | None = None,
) -> None:
    """Replay each file on a cache of its own, or all as one stream.

    Args:
        json: where the figures go: those of all files, and with several, "traces" by name.
        plot: where a chart goes of hits against device pages, a line per eviction order.
        plan: what a page stands for, to tell in tokens and GiB, too; the chart is in GiB then.

    Raises:
        ConfigError: a file cannot be read, or matplotlib is missing.
    """
    if plot is not None:
        need_matplotlib()
    traces = [read_trace(files)] if together else [read_trace([file]) for file in files]
    sweeps = [_sweep(trace, capacity, policy) if plot else {} for trace in traces]
    runs = [1 + sum(map(len, sweep.values())) for sweep in sweeps]
    measure: Callable[[int], float] = plan.gib if plan else float
    with _progress() as progress:
        total = sum(len(trace) * count for trace, count in zip(traces, runs, strict=True))
        tell = functools.partial(progress.advance, progress.add_task("replaying", total=total))
        results = [replay(trace, capacity, policy, tell) for trace in traces]
        lines = [
            Line(
                f"{trace.name}, {name}" if len(traces) > 1 else name,
                [measure(size.device or 0) for size, _ in sweep[name]],
                [replay(trace, size, policy, tell).ratio for size, policy in sweep[name]],
            )
            for trace, sweep in zip(traces, sweeps, strict=True)
            for name in sweep
        ]
    _show(traces, results, capacity)
    everything = functools.reduce(operator.add, results)
    answers = plan.answers(everything) if plan else None
    if plan and answers:
        _show_plan(plan, answers)
    if json is not None:
        figures = dataclasses.asdict(everything)
        if len(traces) > 1:
            named = zip(traces, results, strict=True)
            figures["traces"] = {trace.name: dataclasses.asdict(result) for trace, result in named}
        if plan and answers:
            figures["plan"] = dataclasses.asdict(plan) | dataclasses.asdict(answers)
        json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    if plot is not None:
        draw(plot, lines, "GiB" if plan else "pages")


def _sweep(
    trace: Trace, capacity: Capacity, policy: Policy
) -> dict[str, list[tuple[Capacity, Policy]]]:
    """By eviction order: the device smaller and smaller, the other tiers as they are."""
    sizes = sorted({max(1, trace.distinct >> step) for step in range(_STEPS)})
    sized = [dataclasses.replace(capacity, device=size) for size in sizes]
    return {
        name: [(size, dataclasses.replace(policy, eviction=order)) for size in sized]
        for name, order in EVICTION.items()
        if order is not priority or any(trace.priorities)
    }


def _progress() -> Progress:
    parts = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*parts, console=Console(stderr=True), transient=True)


def _show(traces: list[Trace], results: list[Result], capacity: Capacity) -> None:
    """Print a row per trace, and the sum of several; tiers that there are."""
    tiers = [tier for tier in TIERS if getattr(capacity, tier) != 0]
    table = Table("trace", box=None)
    for name in ("requests", "pages", *(f"hits: {tier}" for tier in tiers), "total", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("evicted", justify="right")
    rows = [(trace.name, result) for trace, result in zip(traces, results, strict=True)]
    if len(rows) > 1:
        rows.append(("all", functools.reduce(operator.add, results)))
    for name, result in rows:
        hits = [result.hits[key] for key in (*tiers, "total")]
        counts = [f"{count:,}" for count in (result.requests, result.pages, *hits)]
        evicted = " / ".join(f"{result.evictions[tier]:,}" for tier in tiers)
        table.add_row(name, *counts, f"{result.ratio:.2%}", evicted)
    Console().print(table)


def _show_plan(plan: Plan, answers: Answers) -> None:
    """Print what hits save, and what moves for that."""
    console = Console()
    console.print(f"saved {answers.saved_tokens:,} of {answers.prompt_tokens:,} prefill tokens")
    moved = [f"{lane} {size / GIB:,.1f}" for lane, size in answers.moved_bytes.items() if size]
    console.print(f"a page is {plan.gib(1):.4f} GiB; moved, in GiB: {', '.join(moved) or 0}")
