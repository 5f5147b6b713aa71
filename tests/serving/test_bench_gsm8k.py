"""kvkeep bench gsm8k"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from bench_runs import QUESTIONS, bench
from stub_server import Reply, event, serving, whole

from kvkeep.bench.serving.client import COMPLETIONS
from kvkeep.bench.serving.gsm8k import last_number
from kvkeep.schema import ConfigError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 39", "39"),
        ("It is 1,200.", "1200"),
        ("1,234,567.50!", "1234567.5"),
        ("that is -7", "-7"),
        ("10-4", "4"),
        ("10 - 4 = 6, so 6.", "6"),
        ("$5.", "5"),
        ("3,4", "4"),
        ("0.5 or .25", "25"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_is_the_answer(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def said(text: str, hit: int = 0) -> Reply:
    usage = {"prompt_tokens": 10, "completion_tokens": 5}
    usage |= {"prompt_tokens_details": {"cached_tokens": hit}}
    return Reply([event(choices=[{"text": text, "finish_reason": "stop"}], usage=usage)])


def graded(prompt: str) -> str:
    """Right for three of the six questions that follow two examples."""
    asked = prompt.rsplit("Question: ", 1)[1]
    assert prompt.count("Question: ") == 3
    assert prompt.startswith("Question: A shelf has 4 rows")
    assert "#### 39\n\nQuestion: A tram" in prompt
    assert asked.endswith("\nAnswer:")
    answers = {
        "Rope": " 75 coins", "A printer": "1200.0", "Three": "15 and then 16",
        "It was": "it was cold", "A bottle": "so it is 7.5.", "Olek": "8",
    }  # fmt: skip
    return next(answer for start, answer in answers.items() if asked.startswith(start))


def test_gsm8k_grades_known_answers_with_the_cache_on_and_off(tmp_path: Path) -> None:
    def on(path: str, body: dict[str, Any]) -> Reply:
        assert (body["stop"], body["max_tokens"]) == (["Question:"], 512)
        assert (body["temperature"], "ignore_eos" in body) == (0, False)
        return said(graded(body["prompt"]), hit=8)

    def off(path: str, body: dict[str, Any]) -> Reply:
        text = graded(body["prompt"])
        return whole({"error": "no"}, 503) if text == "8" else said(text.replace("75", "76"))

    files = {name: tmp_path / f"run.{name}" for name in ("json", "jsonl", "svg")}
    with serving(on) as first, serving(off) as second:
        code, output = bench(
            *("gsm8k", "--file", QUESTIONS, "--num-shots", 2, "--base-url", first.url),
            *("--cache-off-url", second.url, "--json", files["json"]),
            *("--output-file", files["jsonl"], "--plot", files["svg"]),
        )
    assert code == 0
    table = {line[:24].strip(): line[24:].split() for line in output.splitlines()}
    assert table["Accuracy"] == ["0.500", "0.333"]
    assert table["Without a number"] == ["0.167", "0.167"]
    assert table["Texts that differ"] == ["-", "1"]
    assert table["Successful requests"] == ["6", "5"]
    assert table["HTTP 503"] == ["-", "1"]
    assert table["Hit rate"] == ["0.800", "0.000"]
    passes = json.loads(files["json"].read_text())["passes"]
    assert [(each["name"], each["accuracy"]) for each in passes] == [
        ("cache on", 0.5),
        ("cache off", pytest.approx(1 / 3)),
    ]
    lines = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    assert [(line["expected"], line["number"]) for line in lines[:6]] == [
        ("75", "75"), ("1200", "1200.0"), ("15", "16"), ("-7", None), ("7.5", "7.5"), ("7", "8"),
    ]  # fmt: skip
    assert "<svg" in files["svg"].read_text()


def test_seven_right_answers_of_ten_are_an_accuracy_of_seven_tenths(tmp_path: Path) -> None:
    file = tmp_path / "ten.jsonl"
    lines = [{"question": f"{at} + {at}?", "answer": f"#### {2 * at}"} for at in range(10)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def respond(path: str, body: dict[str, Any]) -> Reply:
        at = int(body["prompt"].rsplit("Question: ", 1)[1].split()[0])
        return said(f"That is {2 * at + (at in (2, 5, 9))}.")

    with serving(respond) as stub:
        code, output = bench("gsm8k", "--file", file, "--num-shots", 0, "--base-url", stub.url)
    assert code == 0
    (accuracy,) = [line.split()[1] for line in output.splitlines() if "Accuracy" in line]
    assert accuracy == "0.700"


@pytest.mark.parametrize(
    ("served", "sent"),
    [
        ("/kvkeep/evict", [("/kvkeep/evict", {"tier": "device"})]),
        ("/flush_cache", [("/kvkeep/evict", {"tier": "device"}), ("/flush_cache", {})]),
    ],
)
def test_gsm8k_asks_again_after_an_eviction(
    served: str, sent: list[tuple[str, dict[str, str]]]
) -> None:
    def respond(path: str, body: dict[str, Any]) -> Reply:
        if path == COMPLETIONS:
            return said("1")
        return whole({}, 200 if path == served else 404)

    with serving(respond) as stub:
        few = ("--num-questions", 2, "--num-shots", 1)
        code, output = bench(
            "gsm8k", "--file", QUESTIONS, "--base-url", stub.url, "--evict-between", *few
        )
    assert code == 0
    assert "after eviction" in output
    asked = [COMPLETIONS] * 2
    assert [path for path, _ in stub.requests] == [*asked, *(path for path, _ in sent), *asked]
    assert [request for request in stub.requests if request[0] != COMPLETIONS] == sent


@pytest.mark.parametrize(
    ("status", "message"), [(404, "has neither of"), (500, "evict answers with HTTP 500")]
)
def test_a_server_that_cannot_evict_is_an_error(status: int, message: str) -> None:
    def respond(path: str, body: dict[str, Any]) -> Reply:
        return said("1") if path == COMPLETIONS else whole({}, status)

    with serving(respond) as stub, pytest.raises(ConfigError, match=message):
        bench("gsm8k", "--file", QUESTIONS, "--base-url", stub.url, "--evict-between")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "x"}', ':1 lacks "question" or "answer"'),
        ('{"question": "x", "answer": "none"}', ":1: the answer has no number"),
        ('{"question": "x", "answer": "1"}', "has no question beyond 5 examples"),
    ],
)
def test_wrong_files_of_questions(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        bench("gsm8k", "--file", file)
    assert message in str(error.value)
