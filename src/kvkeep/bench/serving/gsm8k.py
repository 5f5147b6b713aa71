"""``kvkeep bench gsm8k``: whether a server still answers right when its cache is used.

The questions are those of GSM8K (https://arxiv.org/abs/2110.14168) or like them: an answer is right
if its last number is the reference's. Equal accuracy with and without hits is necessary for a
correct cache; equal texts say more, and are counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from ...schema import ConfigError
from .answers import Answer
from .client import Call, Client, Target, connected
from .figures import Flat, per, summarise
from .plots import draw, gsm8k_panels
from .prompts import json_lines
from .running import Outputs, exit_code, finished, offer, progress
from .show import PASS, console, print_failures, print_rows, rows

_NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")
_STOP = ["Question:"]  # a model that goes on asks itself the next one
_EVICTIONS: Mapping[str, Mapping[str, str]] = {
    "/kvkeep/evict": {"tier": "device"},
    "/flush_cache": {},
}
"""Requests that take state off the device, the first that a server has: kvkeep's, SGLang's."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what is right."""

    text: str
    worked: str  # the reference, with its steps
    number: Decimal


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """What is asked, and how."""

    file: Path  # a JSON object per line, with "question" and "answer"
    num_questions: int = 200
    num_shots: int = 5  # worked examples before each question: the first lines, never asked
    max_tokens: int = 512
    max_concurrency: int = 64
    cache_off_url: str = ""  # the same model on a server whose cache is off; empty: none
    evict_between: bool = False  # ask again after the device's state was evicted

    def read(self) -> tuple[str, list[Question]]:
        """The worked examples as text, and the questions.

        Raises:
            ConfigError: the file cannot be read, a line is wrong, or there is no question.
        """
        questions = [
            _question(line, f"{self.file}:{number}") for number, line in json_lines(self.file)
        ]
        shots, rest = questions[: self.num_shots], questions[self.num_shots :]
        if not rest:
            raise ConfigError(f"{self.file} has no question beyond {self.num_shots} examples")
        shown = "".join(f"{_asked(each)} {each.worked}\n\n" for each in shots)
        return shown, rest[: self.num_questions]


def _question(line: Mapping[str, object], where: str) -> Question:
    text, worked = line.get("question"), line.get("answer")
    if not isinstance(text, str) or not isinstance(worked, str):
        raise ConfigError(f'{where} lacks "question" or "answer"')
    number = last_number(worked)
    if number is None:
        raise ConfigError(f"{where}: the answer has no number")
    return Question(text, worked, number)


def _asked(question: Question) -> str:
    return f"Question: {question.text}\nAnswer:"


def last_number(text: str) -> Decimal | None:
    """The last number in ``text``, with or without thousands separators; None: there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True, slots=True)
class Pass:
    """All questions, asked once."""

    name: str
    url: str
    answers: Mapping[int, Answer]  # by question

    def figures(self, questions: Sequence[Question], first: Pass) -> Flat:
        """Its grades beside the summary of its requests. A failed request is a wrong answer.

        Args:
            first: the pass whose texts these are compared with.
        """
        good = {at: answer for at, answer in self.answers.items() if not answer.error}
        numbers = {at: last_number(answer.text) for at, answer in good.items()}
        right = sum(numbers[at] == questions[at].number for at in numbers)
        others = {at: a.text for at, a in first.answers.items() if not a.error}
        differ = sum(good[at].text != others[at] for at in good.keys() & others.keys())
        summary = summarise(self.answers.values())
        return {
            "name": self.name,
            "base_url": self.url,
            "accuracy": per(right, len(self.answers)),
            "invalid": per(list(numbers.values()).count(None), len(self.answers)),
            "differ": None if self is first else differ,
            **summary.flat(),
            "unfinished": len(questions) - len(self.answers) or None,
            "quantiles": summary.quantiles(),
        }

    def lines(self, questions: Sequence[Question]) -> list[Flat]:
        """A record per question, for a file."""
        return [
            {
                "pass": self.name,
                "index": at,
                "expected": str(questions[at].number),
                "number": None if (number := last_number(answer.text)) is None else str(number),
                "text": answer.text,
                "cached_tokens": answer.cached_tokens,
                "latency_ms": 1e3 * answer.latency,
                "error": answer.error or None,
            }
            for at, answer in sorted(self.answers.items())
        ]


def run(target: Target, exam: Exam, outputs: Outputs) -> int:
    """Ask ``target``, print a column per pass, write ``outputs``; return the exit code.

    Raises:
        ConfigError: a server does not answer at all or cannot evict, or a file cannot be read or
            written.
    """
    outputs.check()
    shown, questions = exam.read()
    calls = [
        Call({"prompt": shown + _asked(each), "stop": _STOP}, exam.max_tokens) for each in questions
    ]
    passes: list[Pass] = []

    async def ask(client: Client, name: str) -> None:
        answers: dict[int, Answer] = {}
        passes.append(Pass(name, client.target.root, answers))
        with progress(len(calls), f"bench gsm8k, {name}") as show:

            def done(index: int, answer: Answer) -> None:
                answers[index] = answer
                show(answer)

            await offer(calls, [0.0] * len(calls), exam.max_concurrency, client.send, done)

    async def work() -> None:
        nonlocal target
        async with connected(target) as client:
            target = client.target
            await ask(client, "cache on")
            if exam.evict_between:
                await evict(client)
                await ask(client, "after eviction")
        if exam.cache_off_url:
            async with connected(replace(target, base_url=exam.cache_off_url)) as client:
                await ask(client, "cache off")

    whole = finished(work())
    columns = [each.figures(questions, passes[0]) for each in passes]
    out = console()
    heads = ["", *(each.name for each in passes)]
    print_rows(out, f"{target.model} at {target.root}", heads, rows(PASS, columns))
    for each in passes:
        print_failures(out, summarise(each.answers.values()).messages)
    outputs.write_lines([line for each in passes for line in each.lines(questions)])
    written = outputs.write("gsm8k", target, exam, {"passes": columns})
    if outputs.plot is not None:
        draw(gsm8k_panels([(outputs.tag or target.model, written)]), outputs.plot)
    return exit_code(whole, sum(column["completed"] for column in columns))


async def evict(client: Client) -> None:
    """Take what no request uses off the device, so that it has to come back or be computed.

    Raises:
        ConfigError: the server has no such request, or refuses it.
    """
    for path, body in _EVICTIONS.items():
        status = await client.post(path, body)
        if status < 300:
            return
        if status not in (404, 405):
            raise ConfigError(f"{client.target.root}{path} answers with HTTP {status}")
    raise ConfigError(f"{client.target.root} has neither of {', '.join(_EVICTIONS)}")
