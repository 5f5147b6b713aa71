"""``kvkeep bench experiment restart``: what the draft's KV is worth after a restart.

The published steps: serve with a draft, send one long prompt, restart, send it again. Accept length
and output tokens per second are read from the reports of ``kvkeep bench serve`` and of SGLang's
``bench_serving``, each a program of its own that knows nothing of the experiment.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...demo.process import Server
from ...demo.run import SPECULATIVE, TARGET, storage
from ...schema import ConfigError
from ..serving.prompts import FIRST_ID
from ..serving.running import Outputs
from ..serving.show import console, number, print_rows
from .repeating import PERIODS, VOCABULARY, Words
from .trial import Claim, Start, Tell, conclude, progress, servers

SIDES = {
    "restored": ("both", "strict"),  # draft's KV in storage
    "masked": ("target only", "lenient"),  # not there: its rows are masked
    "stale": ("target only", "stale"),  # not there: the draft reads another prompt's rows
}
"""What storage holds and ``--missing-policy``, by side."""

FASTER = 2.0  # restored / stale, in output tokens per second

Measure = Callable[[str, Path], dict[str, Any]]
"""Runs a client against a URL in a scratch directory; returns its report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What is sent, and how often."""

    prompt_tokens: int = 4096
    output_tokens: int = 200
    turns: int = 5  # restarts of each side for each client


def run(steps: Steps, sglang: Path | None, outputs: Outputs) -> bool:
    """Print medians of each side and client; return whether restored is fast enough.

    Args:
        sglang: a directory with SGLang, for its ``bench_serving``; None: without it.

    Raises:
        ConfigError: a server did not start, or a client failed.
    """
    outputs.check()
    words = Words()
    text = words.text(words.repeated(max(PERIODS), steps.prompt_tokens, seed=0))
    clients = {"kvkeep bench serve": _bench_serve(text, steps)}
    if sglang is None:
        console().print("Left out, for want of --peer-sglang DIR: sglang.bench_serving")
    else:
        clients["sglang.bench_serving"] = _bench_serving(text, steps, sglang)
    found: dict[str, dict[str, list[dict[str, Any]]]]
    found = {client: {side: [] for side in SIDES} for client in clients}
    with (
        tempfile.TemporaryDirectory(prefix="kvkeep-restart-") as scratch,
        servers() as start,
        progress(2 + steps.turns * len(SIDES) * len(clients)) as tell,
    ):
        stored = Path(scratch)
        _fill(text, stored, start, tell)
        for turn in range(steps.turns):
            for client, measure in clients.items():
                for side in list(SIDES)[:: 1 if turn % 2 else -1]:
                    tell(f"{side}, turn {turn + 1}: {client}", 1)
                    with tempfile.TemporaryDirectory(dir=scratch) as here:
                        report = _once(side, stored, Path(here), steps, start, measure)
                    found[client][side].append(report)
    return _judge(steps, found, outputs)


def _fill(text: str, stored: Path, start: Start, tell: Tell) -> None:
    """Have storage hold the prompt's state with the draft's, and elsewhere without it."""
    both, target_only = start(
        [str(TARGET), *SPECULATIVE, *storage(stored / "both")],
        [str(TARGET), *storage(stored / "target only")],
    )
    for server in (both, target_only):
        tell("filling storage", 1)
        server.post("/v1/completions", _body(text, 1))
        server.stop()  # it writes what storage lacks


def _once(
    side: str, stored: Path, here: Path, steps: Steps, start: Start, measure: Measure
) -> dict[str, Any]:
    """Start a server on a copy of what is stored, and measure the prompt's first request to it."""
    content, policy = SIDES[side]
    shutil.copytree(stored / content, here / "stored")
    options = [*SPECULATIVE, *storage(here / "stored"), "--missing-policy", policy]
    (server,) = start([str(TARGET), *options])
    try:
        if side == "stale":
            _leave_rows(server, steps.prompt_tokens)
        return measure(server.url, here)
    finally:
        server.stop()


def _leave_rows(server: Server, tokens: int) -> None:
    """Leave the draft's rows of another prompt in device slots, which are free afterwards."""
    decoy = np.random.default_rng(1).integers(FIRST_ID, VOCABULARY, tokens).tolist()
    server.post("/v1/completions", _body(decoy, 1))
    server.empty("device")


def _body(prompt: str | list[int], tokens: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def _bench_serve(text: str, steps: Steps) -> Measure:
    def measure(url: str, here: Path) -> dict[str, Any]:
        _write(here / "prompts", {"prompt": text, "max_tokens": steps.output_tokens})
        _call(
            *("kvkeep", "bench", "serve", "--base-url", url, "--num-prompts", "1"),
            *("--dataset", str(here / "prompts"), "--json", str(here / "report")),
        )
        report: dict[str, Any] = json.loads((here / "report").read_text())["summary"]
        return report

    return measure


def _bench_serving(text: str, steps: Steps, sglang: Path) -> Measure:
    def measure(url: str, here: Path) -> dict[str, Any]:
        talk = [{"content": text}, {"content": "an answer, which is not sent"}]
        _write(here / "prompts", {"conversations": talk})
        _call(
            *("sglang.bench_serving", "--backend", "sglang", "--base-url", url),
            *("--model", str(TARGET), "--num-prompts", "1", "--warmup-requests", "0"),
            *("--dataset-name", "custom", "--dataset-path", str(here / "prompts")),
            *("--sharegpt-output-len", str(steps.output_tokens)),
            *("--output-file", str(here / "report")),
            path=sglang,
        )
        report: dict[str, Any] = json.loads((here / "report").read_text())
        return report

    return measure


def _write(file: Path, line: dict[str, Any]) -> None:
    file.write_text(json.dumps(line) + "\n")


def _call(module: str, *arguments: str, path: Path | None = None) -> None:
    """Run a module as a program.

    Raises:
        ConfigError: it failed; the message has the end of what it said.
    """
    known = [str(path)] if path else []
    known += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(known)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
        raise ConfigError(f"{module} failed:\n{said}")


def _judge(
    steps: Steps, found: dict[str, dict[str, list[dict[str, Any]]]], outputs: Outputs
) -> bool:
    names = ("accept_length", "output_throughput", "mean_ttft_ms", "mean_e2e_latency_ms")
    medians = {
        client: {
            side: {name: statistics.median(one[name] for one in reports) for name in names}
            for side, reports in sides.items()
        }
        for client, sides in found.items()
    }
    for client, sides in medians.items():
        heads = (client, "accept length", "output tok/s", "TTFT (ms)", "E2E (ms)")
        lines = [
            [side, *(number(one[name], 2 if name == "accept_length" else 1) for name in names)]
            for side, one in sides.items()
        ]
        print_rows(console(), "", heads, lines)
    reports = {
        client: {side: [{n: one[n] for n in names} for one in each] for side, each in sides.items()}
        for client, sides in found.items()
    }
    figures = {"medians": medians, "reports": reports}
    return conclude("restart", asdict(steps), figures, claims(medians), outputs)


def claims(medians: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Claim]:
    """What must hold of the medians, by client, side and name."""
    found = []
    for client, sides in medians.items():
        speeds = {side: one["output_throughput"] for side, one in sides.items()}
        to_stale, to_masked = (speeds["restored"] / speeds[one] for one in ("stale", "masked"))
        found.append(
            Claim(
                f"{client}: restored is {to_stale:.2f} >= {FASTER:.1f} times as fast as stale "
                f"(and {to_masked:.2f} times as fast as masked)",
                to_stale >= FASTER,
            )
        )
    return found
