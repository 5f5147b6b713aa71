"""kvkeep.bench.serving against a stub server. No time is judged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from decimal import Decimal
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_server import END, Reply, event, serving, streamed, whole
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from typer.testing import CliRunner

from kvkeep import cli
from kvkeep.bench.serving import prompts, running
from kvkeep.bench.serving.answers import Answer
from kvkeep.bench.serving.client import CHAT, COMPLETIONS, Call, Target, connected
from kvkeep.bench.serving.events import events
from kvkeep.bench.serving.figures import summarise
from kvkeep.bench.serving.gsm8k import last_number
from kvkeep.bench.serving.multiturn import POLICIES, Conversations, Talks, Turn, round_figures
from kvkeep.bench.serving.running import arrivals, offer
from kvkeep.schema import ConfigError

HIT = {"cached_tokens": {"device": 3, "host": 2, "storage": 0}, "accept_length": 2.5}


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the real one imports PyTorch."""
    monkeypatch.setattr(running, "machine", lambda: {"cpu": "<known>", "commit": "abc"})


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


# --- server-sent events


async def parsed(stream: bytes, size: int) -> list[str]:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(stream), size):
            yield stream[at : at + size]

    return [data.decode() async for data in events(chunks())]


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
async def test_events_wherever_the_stream_is_cut(size: int, end: str) -> None:
    lines = [
        ": a comment", "", "data: één", "", "event: x", "id: 1", "data:two", "data:  lines", "",
        "data", "", ":", "", "data: {}", "", "data: [DONE]", "", "data: too late", "", "",
    ]  # fmt: skip
    stream = end.join(lines).encode()
    assert await parsed(stream, size) == ["één", "two\n lines", "{}"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("", []),
        ("data: 1\n\ndata: 2", ["1", "2"]),
        ("data: 1\n\ndata: [DONE]", ["1"]),
        ("data: [DONE]\n\ndata: 2", []),
        ("data: 1\n\n\n\n: x", ["1"]),
    ],
)
async def test_a_stream_may_end_anywhere(stream: str, expected: list[str]) -> None:
    assert await parsed(stream.encode(), 4) == expected


# --- one request


def sent(reply: Reply, call: Call | None = None, **target: Any) -> Answer:
    """What becomes of one request that a stub answers so."""

    async def work(url: str) -> Answer:
        async with connected(Target(base_url=url, **target)) as client:
            return await client.send(call or Call({"prompt": [1, 2]}, 3, 2))

    with serving(lambda path, body: reply) as stub:
        return asyncio.run(work(stub.url))


def test_an_answer_of_kvkeep() -> None:
    got = sent(Reply(streamed([5, 6, 7], 9, kvkeep=HIT | {"verify_steps": 4})))
    assert (got.text, got.tokens, got.error) == ("t5t6t7", (5, 6, 7), "")
    assert (got.prompt_tokens, got.output_tokens, got.verify_steps) == (9, 3, 4)
    assert got.tiers == {"device": 3, "host": 2, "storage": 0}
    assert (got.cached_tokens, got.accept_length) == (0, 2.5)  # usage says 0, which wins
    assert len(got.times) == 3
    assert got.start < got.times[0] <= got.times[-1] <= got.end


def test_the_first_token_is_the_first_event_with_text_or_tokens() -> None:
    opening = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    held_back = event(choices=[{"delta": {}, "token_ids": [4]}])
    thought = event(choices=[{"delta": {"reasoning_content": "hm"}}])
    said = event(choices=[{"delta": {"content": "yes"}}])
    last = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    chunks = [opening, held_back, thought, said, last, END]
    got = sent(Reply(chunks), Call({"messages": []}, 3))
    assert (got.text, got.tokens, len(got.times)) == ("hmyes", (4,), 3)


def test_tokens_are_counted_where_the_server_does_not() -> None:
    last = event(choices=[{"text": "", "finish_reason": "stop"}])
    text = [event(choices=[{"text": word}], usage=None) for word in "abcd"]
    assert sent(Reply([*text, last])).output_tokens == 4
    ids = event(choices=[{"text": "ab", "token_ids": [1, 2]}])
    got = sent(Reply([ids, last]))
    assert (got.output_tokens, got.prompt_tokens, got.cached_tokens) == (2, 2, None)


def test_an_answer_of_sglang() -> None:
    details = {"device": 3, "host": 4, "storage": 0, "storage_backend": "file"}
    meta = {"spec_accept_length": 1.5, "spec_verify_ct": 6, "id": "x"}
    body = {
        "choices": [{"text": "ab", "finish_reason": "stop", "meta_info": meta}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None},
        "sglext": {"cached_tokens_details": details},
    }
    got = sent(whole(body), stream=False)
    assert (got.text, got.ttft, got.output_tokens) == ("ab", None, 2)
    assert (got.cached_tokens, got.tiers) == (7, {"device": 3, "host": 4, "storage": 0})
    assert (got.accept_length, got.verify_steps) == (1.5, 6)


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (whole({"error": {"message": "too many"}}, 429), "HTTP 429", "too many"),
        (whole({"object": "error", "message": "old"}, 400), "HTTP 400", "old"),
        (Reply([b"<html>\n  down"], 502), "HTTP 502", "<html> down"),
        (Reply([b"\xff\xfe"], 500), "HTTP 500", "\ufffd\ufffd"),
        (Reply([event(error={"message": "lost"}), END]), "error event", "lost"),
        (Reply(streamed([1], finish=None)), "cut short", "without a finish reason"),
        (Reply(streamed([1])[:1], cut=True), "RemoteProtocolError", "incomplete"),
        (Reply([b"data: {\n\n"]), "not understood", "truncated"),
        (Reply([event(choices=[{"text": 5}])]), "not understood", "Expected `str"),
        (Reply([]), "cut short", ""),
    ],
)
def test_failures_have_kinds(reply: Reply, kind: str, message: str) -> None:
    got = sent(reply)
    assert got.error == kind
    assert message in got.message


def test_what_a_request_says() -> None:
    def requested(call: Call, **target: Any) -> tuple[str, dict[str, Any], dict[str, str]]:
        async def work(url: str) -> Answer:
            async with connected(Target(base_url=f"{url}/v1/", **target)) as client:
                return await client.send(call)

        with serving(lambda path, body: Reply(streamed([1]))) as stub:
            assert not asyncio.run(work(stub.url)).error
            return *stub.requests[0], stub.headers[-1]

    path, body, headers = requested(Call({"prompt": [1, 2], "seed": 3}, 7))
    assert (path, body) == (
        COMPLETIONS,
        {
            "model": "stub", "prompt": [1, 2], "seed": 3, "max_tokens": 7, "temperature": 0.0,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        },
    )  # fmt: skip
    assert "authorization" not in headers
    chat = Call({"messages": [{"role": "user", "content": "é"}]}, 7)
    more = {"max_tokens": 1, "min_p": 0.5}
    path, body, headers = requested(
        chat, model="m", api_key="key", stream=True, ignore_eos=False, extra_body=more
    )
    assert (path, body["model"], body["max_tokens"], body["min_p"]) == (CHAT, "m", 1, 0.5)
    assert "ignore_eos" not in body
    assert headers["authorization"] == "Bearer key"
    assert "key" not in repr(Target(api_key="key"))


def test_connections_are_used_again() -> None:
    with serving(lambda path, body: Reply(streamed([1, 2]))) as stub:

        async def work() -> None:
            async with connected(Target(base_url=stub.url)) as client:
                for _ in range(5):
                    assert not (await client.send(Call({"prompt": [1]}, 2))).error

        asyncio.run(work())
        assert len(stub.requests) == 5
        assert stub.connections == 1


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (whole({"error": {"message": "no key"}}, 401), "HTTP 401: no key"),
        (whole({"data": []}), "lists no model; --model names one"),
        (Reply([b"<html>"]), "lists no model"),
    ],
)
def test_a_server_without_a_model_is_an_error(models: Reply, message: str) -> None:
    with serving(lambda *_: whole({}), models=models) as stub, pytest.raises(ConfigError) as error:
        bench("serve", "--base-url", stub.url, "--num-prompts", 1)
    assert message in str(error.value)


def test_a_server_that_is_not_there_is_an_error_unless_its_model_is_named() -> None:
    with serving(lambda *_: whole({})) as stub:
        gone = stub.url
    with pytest.raises(ConfigError, match="does not answer"):
        bench("serve", "--base-url", gone)
    code, output = bench("serve", "--base-url", gone, "--model", "m", "--num-prompts", 2)
    assert code == 1
    assert figures(output)["ConnectError"] == "2"


@pytest.mark.parametrize("url", ["127.0.0.1:1", "ftp://x", "http://", "http://a:b@x", "http://x:y"])
def test_a_base_url_is_checked(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url"):
        Target(base_url=url)


# --- loads


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(20_001, 50.0, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)  # exponential: as great as the mean
    assert (gaps > 1 / 50).mean() == pytest.approx(np.exp(-1), rel=0.03)
    assert arrivals(3, 1.0, np.random.default_rng(7)) == arrivals(3, 1.0, np.random.default_rng(7))
    assert arrivals(3, float("inf"), np.random.default_rng(7)) == [0, 0, 0]
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="--request-rate must be above 0"):
            arrivals(3, wrong, np.random.default_rng(7))


@pytest.mark.anyio
@pytest.mark.parametrize(("cap", "expected"), [(None, 6), (2, 2), (1, 1)])
async def test_no_more_run_at_a_time_than_may(cap: int | None, expected: int) -> None:
    running = most = 0
    order: list[int] = []

    async def send(call: Call) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        order.append(call.max_tokens)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return answer(0.0)

    done: list[int] = []
    calls = [Call({}, n) for n in range(6)]
    await offer(calls, [0.0] * 6, cap, send, lambda index, _: done.append(index))
    assert (most, order, sorted(done)) == (expected, list(range(6)), list(range(6)))


@pytest.mark.anyio
async def test_requests_are_sent_when_they_are_due_though_none_is_answered() -> None:
    gate = asyncio.Event()
    started: list[int] = []

    async def send(call: Call) -> Answer:
        started.append(call.max_tokens)
        if len(started) == 3:
            gate.set()
        await gate.wait()  # forever, if the third waited for the first
        return answer(0.0)

    calls = [Call({}, n) for n in range(3)]
    await asyncio.wait_for(offer(calls, [0.0, 0.001, 0.002], None, send, lambda *_: None), 30)
    assert started == [0, 1, 2]


def test_lengths_are_drawn_from_the_ratio_to_the_most() -> None:
    random = np.random.default_rng(0)
    drawn = prompts.lengths(10, 0.5, 1000, random)
    assert (min(drawn), max(drawn)) == (5, 10)
    assert set(prompts.lengths(10, 1.0, 50, random)) == {10}
    assert set(prompts.lengths(2, 0.0, 50, random)) == {1, 2}


def test_token_ids_are_in_range_and_the_same_for_a_seed() -> None:
    ids = prompts.IdSource(np.random.default_rng(3), 20).draw(500)
    assert (min(ids), max(ids), len(ids)) == (10, 19, 500)
    assert ids == prompts.IdSource(np.random.default_rng(3), 20).draw(500)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A directory with a tokenizer that splits at spaces, and starts each prompt with ``<s>``."""
    words = ["one", "two", "three", "four", "ab", "c"]
    vocab = {"<s>": 0, "<unk>": 1} | {word: 2 + at for at, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_texts_have_exactly_the_tokens_asked_for(tokenizer: Path) -> None:
    made = prompts.read_tokenizer(tokenizer)
    source = prompts.WordSource(np.random.default_rng(0), made, special=True)
    for tokens in (2, 7, 100):
        assert len(made.encode(source.draw(tokens)).ids) == tokens
    plain = prompts.WordSource(np.random.default_rng(0), made, special=False)
    parts = plain.draw(5) + plain.draw(4)
    assert len(made.encode(parts, add_special_tokens=False).ids) == 9
    with pytest.raises(ConfigError, match="no text of exactly 0 tokens"):
        source.draw(0)


def test_a_tokenizer_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        prompts.read_tokenizer(tmp_path)
    made = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    with pytest.raises(ConfigError, match="no words of one token"):
        prompts.WordSource(np.random.default_rng(0), made, special=True)


def test_requests_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    chat = {"messages": [{"role": "user", "content": "x"}], "seed": 1}
    lines = [{"prompt": "a\u2028b"}, {"prompt": [1, 2], "max_tokens": 5}, chat]
    file.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    calls = prompts.file_calls(file, 10, 9)
    assert [call.content for call in calls] == [{"prompt": "a\u2028b"}, {"prompt": [1, 2]}, chat]
    assert [call.max_tokens for call in calls] == [9, 5, 9]
    assert [call.prompt_tokens for call in calls] == [None, 2, None]
    assert [call.path for call in calls] == [COMPLETIONS, COMPLETIONS, CHAT]
    assert len(prompts.file_calls(file, 2, 9)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no requests"),
        ("{", ":1 is not JSON"),
        ("\n[]", ":2 is not a JSON object"),
        ("{}", ':1 has neither "prompt" nor "messages"'),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be 1 or more, not 0"),
    ],
)
def test_wrong_files_of_requests(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "x"
    with pytest.raises(ConfigError, match="cannot read"):
        prompts.file_calls(file, 1, 1)
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        prompts.file_calls(file, 1, 1)
    assert message in str(error.value)


# --- figures


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


# --- bench serve


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


# --- bench multiturn


class Talker:
    """Answers each call with the tokens 1 and 2, and notes what ran at a time."""

    def __init__(self, fail: tuple[int, ...] = ()) -> None:
        self.prompts: list[list[int]] = []
        self.turns: list[Turn] = []
        self.log: list[tuple[str, int]] = []
        self.running = self.most = 0
        self._fail = fail  # which calls, counted from 0

    async def send(self, call: Call) -> Answer:
        at, prompt = len(self.prompts), call.content["prompt"]
        self.prompts.append(prompt)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await asyncio.sleep(0)
        self.running -= 1
        if at in self._fail:
            return answer(0.0, error="HTTP 500")
        return answer(0.0, tokens=(1, 2), prompt_tokens=call.prompt_tokens)

    def talk(self, policy: str = "fifo", rate: float = float("inf"), **fields: Any) -> list[int]:
        """The first token of each prompt, which tells the client, in the order of sending."""
        talks = Talks(ready_queue_policy=policy, request_rate=rate, **fields)
        messages, timing = np.random.default_rng(5).spawn(2)
        source = prompts.IdSource(messages, 10_000_000)

        async def work() -> None:
            await Conversations(talks, source, timing, self.send, self.turns.append).run()

        asyncio.run(work())
        return [prompt[0] for prompt in self.prompts]


def test_a_history_grows_by_each_answer_and_a_new_message() -> None:
    talker = Talker()
    order = talker.talk(num_clients=3, num_rounds=4, request_length=5)
    assert len(talker.turns) == 12
    for client in set(order):
        mine = [prompt for prompt in talker.prompts if prompt[0] == client]
        assert [len(prompt) for prompt in mine] == [5, 12, 19, 26]
        for before, after in pairwise(mine):
            assert after[: len(before) + 2] == [*before, 1, 2]
    assert [t.answer.prompt_tokens for t in talker.turns if t.round == 2] == [19] * 3


def test_a_turn_that_failed_leaves_no_trace_and_ends_nothing() -> None:
    talker = Talker(fail=(1,))
    talker.talk(num_clients=1, num_rounds=4, request_length=5)
    assert [len(prompt) for prompt in talker.prompts] == [5, 12, 12, 19]
    assert talker.prompts[2][:7] == talker.prompts[1][:7]
    assert talker.prompts[2][7:] != talker.prompts[1][7:]
    assert [turn.round for turn in talker.turns] == [0, 1, 2, 3]


def test_clients_are_sent_in_the_order_of_the_policy() -> None:
    few = {"num_clients": 20, "num_rounds": 2, "request_length": 1, "max_parallel": 1}
    fifo = Talker().talk("fifo", **few)
    assert fifo[:20] == fifo[20:]
    assert len(set(fifo)) == 20
    random = Talker().talk("random", **few)
    assert sorted(random) == sorted(fifo)  # the same messages, in another order
    assert random != fifo
    assert random == Talker().talk("random", **few)
    drawn = [POLICIES["random"](5, np.random.default_rng(at)) for at in range(50)]
    assert set(drawn) == set(range(5))


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_run_than_may(limit: int) -> None:
    talker = Talker()
    talker.talk(num_clients=6, num_rounds=3, request_length=1, max_parallel=limit)
    assert talker.most == limit


def test_a_barrier_keeps_rounds_apart() -> None:
    few = {"num_clients": 4, "num_rounds": 3, "request_length": 1, "max_parallel": 3}
    apart, mixed = Talker(), Talker()
    apart.talk("random", enable_round_barrier=True, **few)
    assert [turn.round for turn in apart.turns] == [0] * 4 + [1] * 4 + [2] * 4
    mixed.talk("random", **few)
    assert [turn.round for turn in mixed.turns] != [0] * 4 + [1] * 4 + [2] * 4


def test_figures_of_a_round() -> None:
    good = answer(
        1.0, 1.5, end=2.0, prompt_tokens=80, output_tokens=10, cached_tokens=60,
        tiers={"host": 60}, accept_length=2.0, verify_steps=5,
    )  # fmt: skip
    other = answer(1.0, 1.1, end=5.0, prompt_tokens=20, output_tokens=10, cached_tokens=0)
    expected = {
        "round": 3, "completed": 2, "failed": 1, "prompt_tokens": 100, "cached_tokens": 60,
        "hit_rate": 0.6, "mean_ttft_ms": 300.0, "p90_ttft_ms": 460.0, "mean_latency_ms": 2500.0,
        "duration": 4.0, "output_throughput": 5.0, "accept_length": 2.0,
    }  # fmt: skip
    got = round_figures(3, [good, other, answer(1.0, end=1.5, error="HTTP 500")])
    assert {name: got[name] for name in expected} == pytest.approx(expected)
    assert got["cached_tokens_by_tier"] == {"host": 60}


def cached(path: str, body: dict[str, Any]) -> Reply:
    """Half of every prompt is a hit."""
    prompt = len(body["prompt"])
    hit = {"prompt_tokens_details": {"cached_tokens": prompt // 2}}
    usage = {"prompt_tokens": prompt, "completion_tokens": 1} | hit
    choices = [{"text": "yes", "token_ids": [77], "finish_reason": "length"}]
    return Reply([event(choices=choices, usage=usage)])


def test_multiturn_reports_every_round(tmp_path: Path) -> None:
    files = {name: tmp_path / f"run.{name}" for name in ("json", "jsonl", "svg")}
    with serving(cached) as stub:
        code, output = bench(
            *("multiturn", "--base-url", stub.url, "--num-clients", 3, "--num-rounds", 2),
            *("--request-length", 9, "--output-length", 1, "--request-rate", "inf", "--tag", "on"),
            *("--enable-round-barrier", "--ready-queue-policy", "fifo", "--max-parallel", 2),
            *("--json", files["json"], "--log-file", files["jsonl"], "--plot", files["svg"]),
        )
    assert code == 0
    assert stub.most <= 2
    table = [line.split() for line in output.splitlines() if line.split()[:1] in (["1"], ["2"])]
    assert [line[:5] for line in table] == [
        ["1", "3", "0", "27", "0.444"],
        ["2", "3", "0", "57", "0.474"],
    ]
    lines = [json.loads(line) for line in files["jsonl"].read_text().splitlines()]
    assert [(line["tag"], line["round"], line["cached_tokens"]) for line in lines] == [
        ("on", 1, 12),
        ("on", 2, 27),
    ]
    run = json.loads(files["json"].read_text())
    assert run["rounds"] == [{k: v for k, v in line.items() if k != "tag"} for line in lines]
    assert (run["kind"], run["summary"]["completed"]) == ("multiturn", 6)
    assert (run["setting"]["request_rate"], run["setting"]["num_clients"]) == ("inf", 3)
    assert "<svg" in files["svg"].read_text()


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_text_is_sent_where_token_ids_would_not_come_back(
    tokenizer: Path, with_tokenizer: bool
) -> None:
    last = event(choices=[{"text": " said", "finish_reason": "length"}])
    few = ("--num-clients", 1, "--num-rounds", 2, "--request-length", 4, "--request-rate", "inf")
    more = ("--tokenizer", tokenizer) if with_tokenizer else ()
    with serving(lambda *_: Reply([last])) as stub:
        assert bench("multiturn", "--base-url", stub.url, *few, *more)[0] == 0
    probes = 0 if with_tokenizer else 1
    first, second = (body["prompt"] for _, body in stub.requests[probes:])
    assert second.startswith(f"{first} said ")
    assert (len(first.split()), len(second.split())) == (4, 9)


def test_a_rate_of_requests_is_checked() -> None:
    with pytest.raises(ConfigError, match="--request-rate must be above 0, not 0"):
        bench("multiturn", "--request-rate", 0)


# --- bench gsm8k

QUESTIONS = Path(__file__).parent / "data" / "arithmetic.jsonl"


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


# --- bench report

WILD = "</svg><script>alert('x')</script>--><b>&$"


class Outside(HTMLParser):
    """What a page loads from elsewhere, and its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.svgs += tag == "svg"
        if tag in ("script", "link", "img", "iframe", "b"):
            self.found.append(tag)
        for name, value in attrs:
            loads = name in ("src", "href", "xlink:href") and not (value or "").startswith("#")
            if loads or name.startswith("on"):
                self.found.append(f"{name}={value}")


def made_runs(directory: Path) -> list[Path]:
    """Two runs of each kind, one of them with a tag that looks like markup."""
    files = []
    few = {
        "serve": ("--num-prompts", 3, "--random-input-len", 4),
        "multiturn": ("--num-clients", 2, "--num-rounds", 2, "--request-rate", "inf"),
        "gsm8k": ("--file", QUESTIONS, "--num-shots", 7),
    }
    with serving(cached) as stub:
        for kind, options in few.items():
            for at, tag in enumerate(("", WILD)):
                files.append(directory / f"{kind}-{at}.json")
                more = ("--tag", tag, "--json", files[-1])
                assert bench(kind, "--base-url", stub.url, *options, *more)[0] == 0
    return files


def test_a_report_joins_runs_into_a_page_of_its_own(tmp_path: Path) -> None:
    files, out = made_runs(tmp_path), tmp_path / "out.html"
    assert bench("report", *files, files[0], "--output", out)[0] == 0
    text = out.read_text()
    seen = Outside()
    seen.feed(text)
    assert (seen.found, seen.svgs) == ([], 3)
    assert "@import" not in text
    assert text.count("<h2>") == 3
    for title in (
        "Output token throughput",
        "Hit rate",
        "Accuracy",
        "num_clients",
        "&lt;known&gt;",
    ):
        assert title in text
    assert "serve-0 (1)" in text
    assert "serve-0 (2)" in text
    assert escape(WILD) in text
    assert "<td>abc</td>" in text  # the commit


def test_wrong_runs_are_errors(tmp_path: Path) -> None:
    file, out = tmp_path / "x.json", tmp_path / "out.html"
    for text, message in [
        ("{", "cannot read"),
        ("[]", "is no run of kvkeep bench serve, multiturn, gsm8k"),
        ('{"machine": {}, "parts": {}}', "is no run"),
        ('{"kind": "serve", "tag": ""}', "not as kvkeep bench writes it"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError) as error:
            bench("report", file, "--output", out)
        assert message in str(error.value)
    assert not out.exists()
