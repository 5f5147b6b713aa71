"""``kvkeep bench report``: runs side by side, in one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ...chart import need_matplotlib
from ...output import writable, write_text
from ...schema import ConfigError
from .plots import Panel, Run, gsm8k_panels, multiturn_panels, serve_panels, svg
from .show import PASS, ROUND, SUMMARY, Cells, number, rows

Named = Sequence[tuple[str, Run]]
"""Runs of one kind, each with its label."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; white-space: pre }
section { overflow-x: auto } svg { max-width: 100%; height: auto }
"""


def run(files: Sequence[Path], output: Path) -> None:
    """Write a page with the runs in ``files``, which ``--json`` of the benchmarks wrote.

    Raises:
        ConfigError: a file cannot be read or written, a run is none, or matplotlib is missing.
    """
    need_matplotlib()
    writable(output)
    runs = [read_run(file) for file in files]
    named = list(zip(labels(files, runs), runs, strict=True))
    try:
        text = page(named)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"a run is not as kvkeep bench writes it: {error!r}") from error
    write_text(output, text)


def read_run(file: Path) -> Run:
    """The run in ``file``.

    Raises:
        ConfigError: the file cannot be read, or holds no run.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    if not isinstance(found, dict) or found.get("kind") not in KINDS:
        raise ConfigError(f"{file} is no run of kvkeep bench {', '.join(KINDS)}")
    return found


def labels(files: Sequence[Path], runs: Sequence[Run]) -> list[str]:
    """A name for each run: its tag, or its file's name; numbered where that is not enough."""
    names = [run.get("tag") or file.stem for file, run in zip(files, runs, strict=True)]
    return [
        f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 else name
        for at, name in enumerate(names)
    ]


def page(named: Named) -> str:
    """The page as HTML. Whatever a run says in it is text, never markup."""
    sections = []
    for kind, show in KINDS.items():
        if mine := [(label, run) for label, run in named if run["kind"] == kind]:
            parts = [*show.tables(mine), svg(show.panels(mine))]
            sections.append(f"<section>\n<h2>{show.title}</h2>\n{''.join(parts)}\n</section>\n")
    heads = ["Runs", *(label for label, _ in named)]
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>kvkeep bench</title>\n<style>{_STYLE}</style>\n<h1>kvkeep bench</h1>\n"
        f"{''.join(sections)}<section>\n{table(heads, _setup(named))}</section>\n</html>\n"
    )


def table(heads: Cells, lines: Iterable[Cells]) -> str:
    """A table whose cells are text."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>\n" for line in lines
    )
    return f"<table>\n<tr>{head}</tr>\n{body}</table>\n"


def _setup(named: Named) -> Iterator[Cells]:
    """What each run was of: target, machine, and parameters, a row for each name."""
    columns = [
        {"model": run["model"], "base_url": run["base_url"]}
        | run["machine"]
        | run["setting"]
        | run["request"]
        for _, run in named
    ]
    for name in dict.fromkeys(name for column in columns for name in column):
        yield name, *(str(column.get(name, "")) for column in columns)


def _summaries(named: Named) -> Iterator[str]:
    """A row per figure, a column per run."""
    columns = [run["summary"] for _, run in named]
    yield table(["", *(label for label, _ in named)], rows(SUMMARY, columns))


def _rounds(named: Named) -> Iterator[str]:
    """A table per run with a row per round, then the summaries."""
    for label, run in named:
        cells = [
            [number(each[name], digits) for name, (_, digits) in ROUND.items()]
            for each in run["rounds"]
        ]
        yield f"<h3>{escape(label)}</h3>\n{table([title for title, _ in ROUND.values()], cells)}"
    yield from _summaries(named)


def _passes(named: Named) -> Iterator[str]:
    """A row per figure, a column per pass."""
    every = [(f"{label}: {each['name']}", each) for label, run in named for each in run["passes"]]
    yield table(["", *(label for label, _ in every)], rows(PASS, [each for _, each in every]))


@dataclass(frozen=True, slots=True)
class Kind:
    """How the runs of one kind are shown."""

    title: str
    tables: Callable[[Named], Iterator[str]]
    panels: Callable[[Named], Sequence[Panel]]


KINDS = {
    "serve": Kind("Serving", _summaries, serve_panels),
    "multiturn": Kind("Multi-turn", _rounds, multiturn_panels),
    "gsm8k": Kind("GSM8K", _passes, gsm8k_panels),
}
"""By the ``kind`` of a run, in the order of the page."""
