"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .figures import Flat

Cells = Sequence[str]

WIDTH = 80  # columns; in fewer, figures of a round would not fit

_SPREADS = {
    "ttft_ms": "TTFT (ms)",
    "tpot_ms": "TPOT (ms)",
    "itl_ms": "ITL (ms)",
    "e2e_latency_ms": "E2E latency (ms)",
}
SUMMARY: Mapping[str, tuple[str, int]] = {
    "completed": ("Successful requests", 0),
    "failed": ("Failed requests", 0),
    "unfinished": ("Unfinished requests", 0),
    "duration": ("Benchmark duration (s)", 2),
    "mean_wait_ms": ("Mean wait to be sent (ms)", 2),
    "total_input_tokens": ("Total input tokens", 0),
    "total_output_tokens": ("Total generated tokens", 0),
    "request_throughput": ("Request throughput (req/s)", 2),
    "input_throughput": ("Input token throughput (tok/s)", 2),
    "output_throughput": ("Output token throughput (tok/s)", 2),
    "total_throughput": ("Total token throughput (tok/s)", 2),
    "concurrency": ("Concurrency", 2),
    "accept_length": ("Accept length", 3),
    "total_cached_tokens": ("Hit tokens", 0),
    "cache_hit_rate": ("Hit rate", 3),
} | {
    f"{statistic}_{name}": (f"{statistic.capitalize()} {title}", 2)
    for name, title in _SPREADS.items()
    for statistic in ("mean", "median", "p99")
}
"""Title and decimals of each figure of a run, in the order in which they are shown."""

ROUND: Mapping[str, tuple[str, int]] = {
    "round": ("Round", 0),
    "completed": ("Requests", 0),
    "failed": ("Failed", 0),
    "prompt_tokens": ("Prompt tokens", 0),
    "hit_rate": ("Hit rate", 3),
    "mean_ttft_ms": ("Mean TTFT (ms)", 1),
    "p90_ttft_ms": ("P90 TTFT (ms)", 1),
    "mean_latency_ms": ("Mean latency (ms)", 1),
    "output_throughput": ("Output tok/s", 1),
}
"""Of each figure of a round of a multi-turn run."""

PASS: Mapping[str, tuple[str, int]] = {
    "accuracy": ("Accuracy", 3),
    "invalid": ("Without a number", 3),
    "differ": ("Texts that differ", 0),
} | {name: SUMMARY[name] for name in SUMMARY if not name.endswith(("tpot_ms", "itl_ms"))}
"""Of each figure of a pass over the questions of GSM8K."""


def number(value: float | None, decimals: int) -> str:
    """A figure; ``-`` if the server does not report it."""
    return "-" if value is None else f"{value:,.{decimals}f}"


def rows(titles: Mapping[str, tuple[str, int]], columns: Sequence[Flat]) -> Iterator[Cells]:
    """Title and values of each figure that one of ``columns`` has, hits by tier below the sum."""
    for name, (title, decimals) in titles.items():
        if any(column.get(name) is not None for column in columns):
            yield title, *(number(column.get(name), decimals) for column in columns)
        if name == "total_cached_tokens":
            by_tier = [column.get("cached_tokens_by_tier") or {} for column in columns]
            for tier in dict.fromkeys(tier for tiers in by_tier for tier in tiers):
                yield f"  {tier}", *(number(tiers.get(tier), 0) for tiers in by_tier)
        if name == "failed":
            by_kind = [column.get("errors") or {} for column in columns]
            for kind in dict.fromkeys(kind for kinds in by_kind for kind in kinds):
                yield f"  {kind}", *(number(kinds.get(kind), 0) for kinds in by_kind)


def console() -> Console:
    """To print tables on: as wide as the terminal, and wide enough for every figure."""
    made = Console()
    made.width = max(made.width, WIDTH)
    return made


def print_rows(console: Console, title: str, heads: Cells, lines: Iterable[Cells]) -> None:
    """A table whose first column is of words and whose others are of figures."""
    table = Table(
        title=Text(title) if title else None, box=None, title_justify="left", show_header=any(heads)
    )
    for index, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if index else "left", no_wrap=True)
    for line in lines:
        table.add_row(*map(Text, line))
    console.print(table)


def print_failures(console: Console, messages: Mapping[str, str]) -> None:
    """The first message of each kind of failure."""
    for kind, message in messages.items():
        console.print(f"First {kind}: {message}", markup=False, highlight=False, soft_wrap=True)
