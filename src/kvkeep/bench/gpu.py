"""What CUDA is for, measured: ``python -m kvkeep.bench.gpu``, the second half of ``make gpu``.

Copies between device and host, a load hidden behind a prefill, and decoding, on a model with random
weights in the shape of Llama 3.1 8B (48 GiB of device memory). The sides take turns in one process;
rows hold medians.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from . import copies
from .device_model import PEERS, Llama, decode, hidden_load
from .measure import Row, Tell

COPIED = 1024  # MiB
TURNS = 15


def measure(tell: Tell) -> list[tuple[Row, str]]:
    """Rows, and what their ratios ours / peer are to be."""
    rows = [(one, "<= 1.18") for one in copies.measure(COPIED, TURNS, tell)]
    tell("a random Llama 3.1 8B")
    llama = Llama()
    for backend in ("direct", "kernel"):
        tell(f"a load behind a prefill, {backend}")
        rows.append((hidden_load(llama, backend, TURNS), ">= 0.8"))
    for peer, goal in zip(PEERS, (">= 3", ">= 0.8"), strict=True):
        tell(f"decoding beside {peer}")
        rows.append((decode(llama, peer), goal))
    return rows


def main() -> None:
    console = Console()
    if not torch.cuda.is_available():
        console.print("not run: there is no CUDA device")
        return
    rows = measure(lambda now: console.print(f"measuring {now}", style="dim"))
    console.print(_table(rows))
    where = Path(os.environ.get("OUT", ".")) / "gpu.json"
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    figures = {"machine": machine, "rows": [{**row, "goal": goal} for row, goal in rows]}
    where.write_text(json.dumps(figures, indent=1) + "\n")


def _table(rows: Sequence[tuple[Row, str]]) -> Table:
    table = Table(title=f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", box=None)
    for name in ("", "ours", "unit", "peer", "theirs", "ratio", "goal"):
        table.add_column(name, justify="left" if name in ("", "unit", "peer") else "right")
    for row, goal in rows:
        ours, theirs, ratio = (f"{row[key]:.2f}" for key in ("ours", "peer_value", "ratio"))
        table.add_row(row["name"], ours, row["unit"], row["peer"], theirs, ratio, goal)
    return table


if __name__ == "__main__":
    main()
