"""The serving benchmarks against kvkeep's own server, on an engine that echoes its prompt."""

from __future__ import annotations

import json
from pathlib import Path

from bench_runs import bench, figures
from fake_engine import VOCAB, FakeEngine


def test_serve_reads_what_kvkeep_reports(url: str, tmp_path: Path) -> None:
    code, output = bench(
        *("serve", "--base-url", url, "--vocab-size", VOCAB, "--num-prompts", 5),
        *("--random-input-len", 8, "--random-output-len", 4, "--random-range-ratio", 1),
        *("--output-file", tmp_path / "x.jsonl"),
    )
    assert code == 0
    expected = {
        "Successful requests": "5", "Failed requests": "0", "Total input tokens": "40",
        "Total generated tokens": "20", "Accept length": "1.500", "Hit tokens": "15",
        "device": "10", "host": "5", "storage": "0", "Hit rate": "0.375",
    }  # fmt: skip
    assert expected.items() <= figures(output).items()
    for line in (tmp_path / "x.jsonl").read_text().splitlines():
        assert len(json.loads(line)["itl_ms"]) == 3  # an event per token


def test_a_request_that_the_server_refuses_is_counted(url: str) -> None:
    few = ("--num-prompts", 2, "--random-input-len", 8, "--random-range-ratio", 1)
    code, output = bench("serve", "--base-url", url, "--vocab-size", VOCAB, *few)
    assert code == 1
    assert figures(output)["HTTP 400"] == "2"
    assert "First HTTP 400: the prompt has 8 tokens and the request asks for 1024 more" in output


def test_multiturn_sends_the_tokens_that_were_generated(url: str, engine: FakeEngine) -> None:
    code, output = bench(
        *("multiturn", "--base-url", url, "--vocab-size", VOCAB, "--num-clients", 1),
        *("--num-rounds", 3, "--request-length", 4, "--output-length", 2, "--request-rate", "inf"),
    )
    assert code == 0
    assert figures(output)["Successful requests"] == "3"
    _, first, second, third = (generate.tokens for generate in engine.generates())
    assert second[:6] == [*first, *first[:2]]  # the engine says its prompt again
    assert third[:12] == [*second, *second[:2]]
    assert [len(first), len(second), len(third)] == [4, 10, 16]
