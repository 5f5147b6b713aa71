"""``kvkeep bench experiment outputs``: the same tokens with the cache on and off, from any tier."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...demo.process import Server
from ...demo.run import SPECULATIVE, TARGET, storage
from ..serving.answers import Answer
from ..serving.client import Call
from ..serving.figures import summarise
from ..serving.running import Outputs
from ..serving.show import console, print_rows
from .repeating import PERIODS, demo_prompt
from .trial import Claim, Start, Tell, answers, conclude, progress, servers

OFF = [str(TARGET), "--hicache-ratio", "0"]
TIERS = ("device", "host", "storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is asked."""

    prompts: int = 200  # of the demo's kinds, as many of each
    output_length: int = 128
    concurrency: int = 8  # requests that run at a time


Runs = dict[str, list[Answer]]
"""Answers by run, in the order of the prompts."""


def run(questions: Questions, outputs: Outputs) -> bool:
    """Ask all prompts with the cache off, cold and from each tier; return whether all is equal.

    Raises:
        ConfigError: a server did not start, or a file cannot be written.
    """
    outputs.check()
    each = -(-questions.prompts // len(PERIODS))
    kinds = [(period, index) for index in range(each) for period in PERIODS][: questions.prompts]
    prompts = [demo_prompt(*kind) for kind in kinds]
    with (
        tempfile.TemporaryDirectory(prefix="kvkeep-outputs-") as scratch,
        servers() as start,
        progress(5 * len(prompts)) as tell,
    ):
        runs = _ask(questions, prompts, storage(Path(scratch)), start, tell)
    differing = [
        {"run": name, "prompt": f"period-{kinds[at][0]}/{kinds[at][1]}"}
        | {"off": _said(runs["off"][at]), "on": _said(one)}
        for name, found in runs.items()
        for at, one in enumerate(found)
        if one.error or one.tokens != runs["off"][at].tokens
    ]
    for each_one in differing:
        console().print_json(data=each_one)
    figures = {name: _figures(found, runs["off"]) for name, found in runs.items()}
    lines = [_row(name, len(prompts), one) for name, one in figures.items()]
    print_rows(console(), "", ("run", "equal", "hit tokens", "accept length"), lines)
    everything = {"runs": figures, "differing": differing}
    return conclude("outputs", asdict(questions), everything, claims(runs), outputs)


def _ask(
    questions: Questions, prompts: list[list[int]], stored: list[str], start: Start, tell: Tell
) -> Runs:
    """A group of prompts at a time, so that the device has all of a group's state."""
    runs: Runs = {name: [] for name in ("off", "cold", *TIERS)}
    size = questions.concurrency

    def ask(server: Server, name: str, group: Sequence[list[int]]) -> None:
        salts = [f"{name} {len(runs[name]) + at}" if name == "off" else "" for at in range(size)]
        calls = [
            Call({"prompt": prompt, "cache_salt": salt}, questions.output_length)
            for prompt, salt in zip(group, salts, strict=False)
        ]
        runs[name] += answers(server, calls, size)
        tell(name, len(group))

    groups = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    on = [str(TARGET), *SPECULATIVE, *stored]
    off, first = start(OFF, on)
    for group in groups:
        ask(off, "off", group)
        ask(first, "cold", group)
        ask(first, "device", group)
        first.empty("device")
        ask(first, "host", group)
    first.stop()
    (again,) = start(on)
    for group in groups:
        ask(again, "storage", group)
    return runs


def claims(runs: Runs) -> list[Claim]:
    """What must hold of the answers."""
    off, total = runs["off"], len(runs["off"])
    good = not any(one.error or one.cached_tokens for one in off)
    found = [Claim(f"cache off: {total} prompts, all answered, none with a hit", good)]
    for name, answered in runs.items():
        if name != "off":
            same = _equal(answered, off)
            found.append(Claim(f"{name}: {same} of {total} outputs as with it off", same == total))
    for tier in TIERS:
        hits = sum(one.tiers.get(tier, 0) > 0 for one in runs[tier])
        found.append(Claim(f"{tier}: {hits} of {total} hits came from there", hits == total))
    return found


def _equal(answered: Sequence[Answer], off: Sequence[Answer]) -> int:
    pairs = zip(answered, off, strict=True)
    return sum(not (a.error or b.error) and a.tokens == b.tokens for a, b in pairs)


def _said(answer: Answer) -> dict[str, Any]:
    return {"tokens": list(answer.tokens), "text": answer.text, "error": answer.error}


def _figures(found: Sequence[Answer], off: Sequence[Answer]) -> dict[str, Any]:
    whole = summarise(found)
    return {
        "equal": _equal(found, off),
        "cached_tokens_by_tier": dict(whole.cached_tokens_by_tier),
        "accept_length": whole.accept_length,
        "duration": whole.duration,
    }


def _row(name: str, total: int, figures: dict[str, Any]) -> list[str]:
    hits = ", ".join(f"{n:,} {tier}" for tier, n in figures["cached_tokens_by_tier"].items() if n)
    length = figures["accept_length"]
    return [name, f"{figures['equal']}/{total}", hits, f"{length:.2f}" if length else ""]
