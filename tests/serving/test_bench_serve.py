"""kvkeep bench serve: known timings, and a stub server"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_runs import HIT, answer, bench, figures
from stub_server import Reply, serving, streamed, whole

from kvkeep.bench.serving import prompts
from kvkeep.bench.serving.client import CHAT, COMPLETIONS
from kvkeep.bench.serving.figures import summarise
from kvkeep.bench.serving.serve import request_line
from kvkeep.schema import ConfigError


def test_a_report_of_known_timings() -> None:
    first = answer(
        10.0, 10.5, 10.6, 10.8, end=11.0, prompt_tokens=100, output_tokens=6, cached_tokens=40,
        tiers={"host": 40}, accept_length=3.0, verify_steps=1,
    )  # fmt: skip
    second = answer(
        11.0, 11.1, end=12.0, prompt_tokens=60, output_tokens=1, cached_tokens=20,
        tiers={"host": 5, "device": 15}, accept_length=1.0, verify_steps=3,
    )  # fmt: skip
    failed = answer(10.0, end=14.0, error="HTTP 429", message="first")
    again = answer(10.0, end=11.0, error="HTTP 429", message="second")
    summary = summarise([first, second, failed, again])
    flat = summary.flat()
    assert summary.messages == {"HTTP 429": "first"}
    assert flat["errors"] == {"HTTP 429": 2}
    expected = {
        "completed": 2, "failed": 2, "duration": 4.0, "concurrency": 0.5,
        "total_input_tokens": 160, "total_output_tokens": 7, "request_throughput": 0.5,
        "input_throughput": 40.0, "output_throughput": 1.75, "total_throughput": 41.75,
        "mean_ttft_ms": 300.0, "median_ttft_ms": 300.0, "p99_ttft_ms": 496.0,
        "mean_tpot_ms": 100.0, "mean_itl_ms": 150.0, "p99_itl_ms": 199.0,
        "mean_e2e_latency_ms": 1000.0, "accept_length": 1.5,
        "total_cached_tokens": 60, "cache_hit_rate": 0.375,
    }  # fmt: skip
    assert {name: flat[name] for name in expected} == pytest.approx(expected)
    assert flat["cached_tokens_by_tier"] == {"host": 45, "device": 15}
    quantiles = summary.quantiles()["ttft_ms"]
    assert len(quantiles) == 101
    assert (quantiles[0], quantiles[100]) == pytest.approx((100, 500))


def test_the_line_of_a_request() -> None:
    got = answer(12.0, 12.5, 12.75, end=13.0, prompt_tokens=9, output_tokens=4, tiers={"host": 2})
    line = request_line(3, 1.25, got, 10.0)
    expected = {
        "index": 3, "due_s": 1.25, "start_s": 2.0, "wait_ms": 750.0, "ttft_ms": 500.0,
        "latency_ms": 1000.0, "itl_ms": [250.0], "prompt_tokens": 9, "output_tokens": 4,
        "cached_tokens": None, "cached_tokens_by_tier": {"host": 2}, "error": None,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    assert request_line(3, 2.5, got, 10.0)["wait_ms"] == 0


def test_what_is_not_reported_is_not_zero() -> None:
    flat = summarise([answer(0.0, end=1.0, prompt_tokens=5)]).flat()
    for name in ("mean_ttft_ms", "p99_itl_ms", "accept_length", "cache_hit_rate"):
        assert flat[name] is None
    assert flat["total_cached_tokens"] is None
    empty = summarise([]).flat()
    assert (empty["completed"], empty["request_throughput"]) == (0, None)


def test_accept_lengths_without_their_weights_count_alike() -> None:
    lengths = [answer(0.0, accept_length=x, verify_steps=n) for x, n in ((1.0, 9), (3.0, 0))]
    assert summarise(lengths).accept_length == 2.0


def test_serve_reports_to_the_console_and_to_files(tmp_path: Path) -> None:
    def respond(path: str, body: dict[str, Any]) -> Reply:
        if len(stub.requests) == 2:
            return whole({"error": {"message": "[red]busy"}}, 429)
        tokens = list(range(body["max_tokens"]))
        return Reply(streamed(tokens, len(body["prompt"]), kvkeep=HIT | {"verify_steps": 2}))

    files = {name: tmp_path / f"run.{name}" for name in ("json", "jsonl", "svg")}
    with serving(respond) as stub:
        code, output = bench(
            *("serve", "--base-url", stub.url, "--num-prompts", 6, "--tag", "first $"),
            *("--random-input-len", 20, "--random-output-len", 4, "--max-concurrency", 2),
            *("--random-range-ratio", 1, "--request-rate", 1e6, "--api-key", "secret"),
            *("--json", files["json"], "--output-file", files["jsonl"], "--plot", files["svg"]),
        )
    assert code == 0
    assert stub.most <= 2
    shown = figures(output)
    expected = {
        "Successful requests": "5", "Failed requests": "1", "HTTP 429": "1",
        "Total input tokens": "100", "Total generated tokens": "20", "Accept length": "2.500",
        "device": "15", "host": "10",
    }  # fmt: skip
    assert expected.items() <= shown.items()
    assert "First HTTP 429: [red]busy" in output
    for title in ("Mean TTFT (ms)", "Median TPOT (ms)", "P99 ITL (ms)", "P99 E2E latency (ms)"):
        assert float(shown[title].replace(",", "")) >= 0
    assert "secret" not in output + files["json"].read_text()
    run = json.loads(files["json"].read_text())
    assert (run["kind"], run["tag"], run["model"]) == ("serve", "first $", "stub")
    assert run["setting"]["request_rate"] == 1e6
    assert run["summary"]["completed"] == 5
    assert run["machine"] == {"cpu": "<known>", "commit": "abc"}
    lines = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(6))
    assert [line["error"] for line in lines].count("HTTP 429") == 1
    good = next(line for line in lines if not line["error"])
    assert (good["prompt_tokens"], good["output_tokens"], len(good["itl_ms"])) == (20, 4, 3)
    assert good["cached_tokens_by_tier"]["host"] == 2
    assert "<svg" in files["svg"].read_text()


def test_prompts_are_the_same_for_a_seed(tokenizer: Path) -> None:
    def asked(*more: object) -> list[Any]:
        few = ("--num-prompts", 4, "--random-input-len", 9, "--random-output-len", 2)
        with serving(lambda *_: Reply(streamed([1]))) as stub:
            bench("serve", "--base-url", stub.url, "--max-concurrency", 1, *few, *more)
        return [body["prompt"] for _, body in stub.requests]

    assert asked("--seed", 1) == asked("--seed", 1) != asked("--seed", 2)
    texts = asked("--tokenizer", tokenizer, "--random-range-ratio", 1)
    made = prompts.read_tokenizer(tokenizer)
    assert [len(made.encode(text).ids) for text in texts] == [9] * 4


def test_a_file_of_requests_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "a"}\n')
    body = {"choices": [{"message": {"content": "yes"}, "text": "yes", "finish_reason": "stop"}]}
    with serving(lambda *_: whole(body)) as stub:
        code, output = bench(
            *("serve", "--base-url", stub.url, "--dataset", file, "--no-stream"),
            *("--no-ignore-eos", "--extra-body", '{"cache_salt": "x"}', "--temperature", 0.5),
        )
    assert code == 0
    assert "TTFT" not in output
    assert sorted(path for path, _ in stub.requests) == [CHAT, COMPLETIONS]
    for _, sent in stub.requests:
        assert (sent["cache_salt"], sent["temperature"], sent["stream"]) == ("x", 0.5, False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises, also where the tests were started in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_reports_what_is_there(tmp_path: Path) -> None:
    def respond(path: str, body: dict[str, Any]) -> Reply:
        if len(stub.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return Reply(streamed([1, 2]))

    file = tmp_path / "run.json"
    with serving(respond) as stub:
        code, output = bench(
            *("serve", "--base-url", stub.url, "--num-prompts", 500, "--max-concurrency", 1),
            *("--json", file),
        )
    shown = figures(output)
    done = int(shown["Successful requests"])
    assert code == 130
    assert 2 <= done < 500
    assert int(shown["Unfinished requests"]) == 500 - done
    assert json.loads(file.read_text())["summary"]["completed"] == done


@pytest.mark.parametrize("flag", ["--json", "--output-file", "--plot"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_sent(flag: str) -> None:
    with (
        serving(lambda *_: Reply([])) as stub,
        pytest.raises(ConfigError, match="there is no directory"),
    ):
        bench("serve", "--base-url", stub.url, flag, "/none/x.svg")
    assert not stub.headers


@pytest.mark.parametrize("value", ["{", "[]"])
def test_more_fields_must_be_an_object(value: str) -> None:
    code, _ = bench("serve", "--extra-body", value)
    assert code == 2


def test_another_first_word_is_a_part() -> None:
    with pytest.raises(ConfigError, match="cannot bench 'nonsense'"):
        bench("nonsense", "--quick")
    with pytest.raises(ConfigError, match="cannot bench 'nonsense'"):
        bench("--quick", "nonsense")


def metrics(accepted: float, drafts: float) -> Reply:
    name = "vllm:spec_decode_num"
    lines = [
        "# HELP vllm:spec_decode_num_drafts_total x",
        f'{name}_drafts_total{{engine="0",model_name="m"}} {drafts - 1}',
        f'{name}_drafts_total{{engine="1",model_name="m"}} 1.0',
        f'{name}_accepted_tokens_total{{engine="0"}} {accepted}',
        f'{name}_accepted_tokens_per_pos_total{{engine="0",position="0"}} 7.0',
    ]
    return Reply(["\n".join(lines).encode()])


INFO = {"internal_states": [{"avg_spec_accept_length": 3.25}]}


@pytest.mark.parametrize(
    ("pages", "said", "expected"),
    [
        ({"/metrics": [metrics(100, 50), metrics(160, 80)]}, {}, "3.000"),
        ({"/metrics": [metrics(100, 50), metrics(100, 50)]}, {}, None),
        ({"/server_info": [whole({}), whole(INFO)]}, {}, "3.250"),
        ({"/server_info": [whole({}), whole({"internal_states": []})]}, {}, None),
        ({"/server_info": [whole(INFO), whole(INFO)]}, {"kvkeep": HIT}, "2.500"),
    ],
)
def test_where_accept_lengths_come_from(
    pages: dict[str, list[Reply]], said: dict[str, Any], expected: str | None
) -> None:
    with serving(lambda *_: Reply(streamed([1], **said)), pages=pages) as stub:
        code, output = bench("serve", "--base-url", stub.url, "--num-prompts", 2)
    assert code == 0
    assert figures(output).get("Accept length") == expected
