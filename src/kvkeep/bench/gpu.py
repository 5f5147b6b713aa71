"""What CUDA is for, measured: ``python -m kvkeep.bench.gpu``, the second half of ``make gpu``.

Copies between device and host, a load hidden behind a prefill, and decoding, on a model with random
weights in the shape of Llama 3.1 8B (48 GiB of device memory). The sides take turns in one process;
rows hold medians. All are told in one table, and written when they are known: what comes last may
break the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..output import writable, write_json
from . import copies
from .device_model import PEERS, Llama, decode, hidden_load
from .machine import machine
from .measure import Row, Tell

COPIED = 1024  # MiB
TURNS = 15


class Part(NamedTuple):
    """What is measured together."""

    name: str
    goal: str  # what the ratios ours / peer are to be
    measure: Callable[[], Sequence[Row]]


def parts(tell: Tell) -> list[Part]:
    """All there is, the riskiest last."""
    llama = cache(Llama)

    def hidden(backend: str) -> list[Row]:
        return [hidden_load(llama(), backend, TURNS)]

    def decoding(peer: str) -> list[Row]:
        return [decode(llama(), peer)]

    return [
        Part("copies", "<= 1.18", lambda: copies.measure(COPIED, TURNS, tell)),
        *(
            Part(f"a load behind a prefill, {backend}", ">= 0.8", partial(hidden, backend))
            for backend in ("direct", "kernel")
        ),
        *(
            Part(f"decoding beside {peer}", goal, partial(decoding, peer))
            for peer, goal in zip(PEERS, (">= 3", ">= 0.8", ">= 0.8"), strict=True)
        ),
    ]


def run(parts: Sequence[Part], file: Path) -> list[dict[str, Any]]:
    """Rows of all parts, written after each. One that fails is a row that says so."""
    rows = list[dict[str, Any]]()
    for part in parts:
        print(f"measuring {part.name}", flush=True)
        try:
            found = [{**row, "goal": part.goal} for row in part.measure()]
        except Exception as error:  # of a peer or of ours: the others are measured nonetheless
            why = f"{type(error).__name__}: {error}"
            found = [{"name": part.name, "goal": part.goal, "failed": why}]
        rows += found
        write_json(file, {"machine": machine(), "rows": rows})
    return rows


def main() -> None:
    if not torch.cuda.is_available():
        print("not run: there is no CUDA device")
        return
    file = writable(Path(os.environ.get("OUT", ".")) / "gpu.json")
    rows = run(parts(lambda now: print(f"measuring {now}")), file)
    Console().print(as_table(rows))
    sys.exit(any("failed" in row for row in rows))


def as_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per row. Where they do not fit, names are folded, and figures are not."""
    table = Table(box=None)
    for name in ("", "ours", "unit", "peer", "theirs", "ratio", "goal"):
        table.add_column(name, no_wrap=name not in ("", "peer"), overflow="fold")
    for row in rows:
        if "failed" in row:
            cells = "", "", f"failed, {row['failed']}", "", ""
        else:
            ours, theirs, ratio = (f"{row[key]:.2f}" for key in ("ours", "peer_value", "ratio"))
            cells = ours, row["unit"], row["peer"], theirs, ratio
        table.add_row(*(Text(cell) for cell in (row["name"], *cells, row["goal"])))
    return table


if __name__ == "__main__":
    main()
