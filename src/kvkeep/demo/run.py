"""``kvkeep demo``: restores prompts from every tier, with and without the draft's KV.

Server processes answer HTTP requests. Every restart ends a process and starts a new one on the same
storage directory. Prompts are token ids and outputs are compared as token ids, because text made of
random tokens does not survive decoding and re-encoding.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .process import Server
from .report import Row, show

HERE = Path(__file__).parent
TARGET, DRAFT = HERE / "pair" / "target", HERE / "pair" / "draft"
NEW_TOKENS, STEPS = 200, 7

SPECULATIVE = [
    *("--draft", str(DRAFT), "--speculative-num-steps", str(STEPS)),
    *("--speculative-num-draft-tokens", str(STEPS + 1)),
]
"""Options of a server with the draft."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of the demo's prompts."""

    name: str  # "period-64/0"
    tokens: list[int]
    decoy: list[int]  # an unrelated prompt, whose draft rows the "stale" run reads


def prompts() -> list[Prompt]:
    """Four prompts of period 64 and four of period 200, about 1,024 tokens each."""
    stored = json.loads((HERE / "prompts.json").read_text())
    return [
        Prompt(f"{period}/{i}", tokens, stored["decoy"][i])
        for period in ("period-64", "period-200")
        for i, tokens in enumerate(stored[period])
    ]


def run(json_file: Path | None = None) -> bool:
    """Run the demo and print its report; return whether all checks hold.

    Args:
        json_file: also write all rows to this file.

    Raises:
        ConfigError: a server did not start.
    """
    console = Console()
    todo = prompts()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar, tempfile.TemporaryDirectory(prefix="kvkeep-demo-") as scratch, ExitStack() as stack:
        task = bar.add_task("starting servers", total=7 * len(todo))

        def servers(*arguments: list[str]) -> list[Server]:
            bar.update(task, description="starting servers")
            started = [Server([str(TARGET), *one]) for one in arguments]
            for server in started:
                stack.callback(server.stop)
            for server in started:
                server.wait()
            return started

        def done(name: str) -> None:
            bar.update(task, description=name, advance=1)

        rows = _measure(todo, Path(scratch), servers, done)
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": [row.to_json() for row in rows]}, indent=1))
    return show(rows, console)


def _measure(
    todo: list[Prompt],
    scratch: Path,
    servers: Callable[..., list[Server]],
    done: Callable[[str], None],
) -> list[Row]:
    """Run all prompts in all conditions; one row each."""
    both, target_only = storage(scratch / "both"), storage(scratch / "target-only")
    results: list[tuple[str, str, dict[str, Any]]] = []

    def ask(server: Server, prompt: Prompt, run_name: str) -> None:
        done(f"{run_name}: {prompt.name}")
        results.append((prompt.name, run_name, _complete(server, prompt.tokens)))

    plain, first = servers(target_only, [*SPECULATIVE, *both])
    for prompt in todo:
        ask(plain, prompt, "plain")
        ask(first, prompt, "cold")
        ask(first, prompt, "device")
        first.empty("device")
        ask(first, prompt, "host")
    plain.stop()
    first.stop()

    again, masked, stale = servers(
        [*SPECULATIVE, *both],
        [*SPECULATIVE, *target_only, "--missing-policy", "lenient"],
        [*SPECULATIVE, *target_only, "--missing-policy", "stale"],
    )
    for prompt in todo:
        ask(again, prompt, "storage")
        ask(masked, prompt, "masked")
        _complete(stale, prompt.decoy, new_tokens=1)  # leaves its draft rows in device slots,
        stale.empty("device")  # which are free now and go to the prompt
        ask(stale, prompt, "stale")
    return _rows(results)


def storage(directory: Path) -> list[str]:
    """Options of a server that stores in ``directory``, and loads whatever it hits there."""
    where = ["--hicache-storage-backend", "file", "--hicache-storage-dir", str(directory)]
    return [*where, "--recompute-policy", "never"]


def _complete(server: Server, tokens: list[int], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
    return server.post(
        "/v1/completions",
        {
            "model": TARGET.name,
            "prompt": tokens,
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "kvkeep": {"report_proposals": True},
        },
    )


def _rows(results: list[tuple[str, str, dict[str, Any]]]) -> list[Row]:
    """A row for each response, compared with the plain and cold ones of the same prompt."""
    answers = {(name, run_name): answer for name, run_name, answer in results}
    return [
        Row.of(name, run_name, answer, answers[name, "plain"], answers[name, "cold"])
        for name, run_name, answer in results
    ]
