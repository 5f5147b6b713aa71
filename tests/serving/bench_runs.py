"""Runs of the command, their tables, and answers of known timings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stub_server import Reply, event
from typer.testing import CliRunner

from kvkeep import cli
from kvkeep.bench.serving.answers import Answer

HIT = {"cached_tokens": {"device": 3, "host": 2, "storage": 0}, "accept_length": 2.5}


def bench(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def figures(output: str) -> dict[str, str]:
    """The rows of a table with one column."""
    found = [line.strip().rsplit(maxsplit=1) for line in output.splitlines() if "  " in line]
    return {row[0].strip(): row[1] for row in found if len(row) == 2}


def answer(start: float, *times: float, **fields: Any) -> Answer:
    end = fields.pop("end", times[-1] if times else start)
    return Answer(start=start, end=end, times=times, **{"tiers": {}, **fields})


def cached(path: str, body: dict[str, Any]) -> Reply:
    """Half of every prompt is a hit."""
    prompt = len(body["prompt"])
    hit = {"prompt_tokens_details": {"cached_tokens": prompt // 2}}
    usage = {"prompt_tokens": prompt, "completion_tokens": 1} | hit
    choices = [{"text": "yes", "token_ids": [77], "finish_reason": "length"}]
    return Reply([event(choices=choices, usage=usage)])


QUESTIONS = Path(__file__).parents[1] / "data" / "arithmetic.jsonl"
