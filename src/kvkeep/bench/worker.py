"""One side of a comparison of two commits, in a process of its own: see :mod:`.commits`.

It runs as a file, with the ``kvkeep`` of that side's checkout on the path, so it may use only what
every commit has: ``PARTS``, ``Setting`` and ``machine``. On standard output it writes one JSON
line ``[kind, value]`` at a time, and goes on when it reads a line: first ``["machine", {...}]``,
then, for each turn, ``["tell", what]`` before each step and ``["rows", [...]]`` after the last.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from kvkeep.bench.machine import machine
from kvkeep.bench.parts import PARTS, Setting


def main(part: str, quick: bool, directory: str | None) -> None:
    """Measure ``part``, one turn after another, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer

    def answer(kind: str, value: Any) -> None:
        print(json.dumps((kind, value)), file=answers, flush=True)
        if not sys.stdin.readline():
            sys.exit()

    setting = Setting(repeats=1, quick=quick, directory=Path(directory) if directory else None)
    answer("machine", machine())
    while True:
        answer("rows", PARTS[part](setting, lambda what: answer("tell", what)))


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
