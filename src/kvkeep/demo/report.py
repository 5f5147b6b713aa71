"""The demo's report: one row per prompt and run, tables of means, and checks on them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

RUNS = {
    "plain": "no speculation",
    "cold": "nothing cached",
    "device": "hit on the device",
    "host": "device emptied: hit on the host",
    "storage": "server restarted: hit in storage",
    "masked": "restarted, no draft KV in storage: its rows are masked (lenient)",
    "stale": "restarted, no draft KV in storage: the draft reads another prompt's rows",
}
"""Description of each run, in the order of the table's rows."""

_TIERS = ("device", "host", "storage")


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one prompt in one run."""

    prompt: str  # "period-64/0"
    run: str  # a key of RUNS
    cached_tokens: dict[str, int]  # prefix hit by tier
    ttft_ms: float
    tokens_per_s: float  # decoding speed after the first token
    accept_length: float | None  # None: no speculation
    proposals_equal: float | None  # share of proposed tokens that equal the cold run's
    output_equal: bool  # the output equals the plain run's

    @classmethod
    def of(
        cls,
        prompt: str,
        run: str,
        answer: dict[str, Any],
        plain: dict[str, Any],
        cold: dict[str, Any],
    ) -> Row:
        """Make a row from ``answer``, compared with the plain and cold runs of its prompt.

        All three are parsed responses of ``/v1/completions``.
        """
        ids, report = _ids(answer), answer["kvkeep"]
        return cls(
            prompt,
            run,
            report["cached_tokens"],
            report["ttft_ms"],
            1e3 * (len(ids) - 1) / report["decode_ms"],
            report["accept_length"],
            None if run == "plain" else _agreement(answer, cold),
            ids == _ids(plain),
        )

    def to_json(self) -> dict[str, Any]:
        """The row as a dict of JSON types."""
        return dataclasses.asdict(self)


def show(rows: list[Row], console: Console) -> bool:
    """Print the tables and the checks; return whether all checks hold."""
    periods = list(dict.fromkeys(_period(row) for row in rows))
    for period in periods:
        console.print(_table(period, rows))
    for name, meaning in RUNS.items():
        console.print(f"[bold]{name:7}[/] {meaning}")
    console.print()
    held = True
    for claim, holds in _claims(rows):
        verdict = "[green]holds[/]" if holds else "[red]FAILS[/]"
        console.print(f"{verdict}  {claim}", soft_wrap=True)
        held &= holds
    return held


def _table(period: str, rows: list[Row]) -> Table:
    count = len({row.prompt for row in rows if _period(row) == period})
    table = Table(title=f"{count} prompts of {period.replace('-', ' ')} tokens, means")
    table.add_column("run", no_wrap=True)
    table.add_column("cached tokens", no_wrap=True)
    for name in (
        "TTFT ms",
        "tokens per s",
        "accept length",
        "proposals as cold",
        "output as plain",
    ):
        table.add_column(name.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for run in RUNS:
        mine = [row for row in rows if row.run == run and _period(row) == period]
        tiers = {tier: fmean(row.cached_tokens[tier] for row in mine) for tier in _TIERS}
        speculates = run != "plain"
        table.add_row(
            run,
            ", ".join(f"{tokens:.0f} {tier}" for tier, tokens in tiers.items() if tokens),
            f"{fmean(r.ttft_ms for r in mine):.0f}",
            f"{fmean(r.tokens_per_s for r in mine):.0f}",
            f"{_mean(mine, 'accept_length'):.2f}" if speculates else "",
            f"{_mean(mine, 'proposals_equal'):.1%}" if speculates else "",
            f"{sum(r.output_equal for r in mine)}/{len(mine)}",
        )
    return table


def _claims(rows: list[Row]) -> list[tuple[str, bool]]:
    """Each check in words, and whether it holds."""

    def mean(run: str, period: str, figure: str) -> float:
        return _mean([r for r in rows if r.run == run and _period(r) == period], figure)

    claims = [("every output equals that without speculation", all(r.output_equal for r in rows))]
    for period, limit in (("period-64", 3.5), ("period-200", 2.0)):
        cold = mean("cold", period, "accept_length")
        claims.append((f"{period}: cold: accept length {cold:.2f} >= 7.0", cold >= 7.0))
        for run in _TIERS:
            length = mean(run, period, "accept_length")
            equal = mean(run, period, "proposals_equal")
            claims.append(
                (
                    f"{period}: {run} hit: accept length {length:.2f} within 2% of cold, "
                    f"{equal:.1%} >= 99% of proposals as cold",
                    abs(length - cold) <= 0.02 * cold and equal >= 0.99,
                )
            )
        stale = mean("stale", period, "accept_length")
        claims.append(
            (f"{period}: stale draft KV: accept length {stale:.2f} <= {limit}", stale <= limit)
        )
    for tier in _TIERS:
        hits = [row.cached_tokens[tier] > 0 for row in rows if row.run == tier]
        claims.append((f"every {tier} hit came from the {tier} tier", all(hits)))
    speedup = mean("storage", "period-200", "tokens_per_s") / mean(
        "stale", "period-200", "tokens_per_s"
    )
    claims.append(
        (f"period-200: storage hit decodes {speedup:.1f}x >= 2x as fast as stale", speedup >= 2)
    )
    return claims


def _period(row: Row) -> str:
    return row.prompt.split("/")[0]


def _mean(rows: list[Row], figure: str) -> float:
    return float(fmean(getattr(row, figure) for row in rows))


def _ids(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def _agreement(answer: dict[str, Any], cold: dict[str, Any]) -> float:
    """Share of proposed tokens that equal the cold run's at the same round and position.

    A token without a counterpart in the other run counts as different.
    """
    ours, theirs = answer["kvkeep"]["proposals"], cold["kvkeep"]["proposals"]
    same = sum(
        a == b
        for mine, other in zip(ours, theirs, strict=False)
        for a, b in zip(mine, other, strict=False)
    )
    return float(same / max(sum(map(len, ours)), sum(map(len, theirs))))
