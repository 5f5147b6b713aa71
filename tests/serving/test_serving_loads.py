"""kvkeep.bench.serving.prompts and running: what is sent, and when"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from bench_runs import answer
from tokenizers import Tokenizer, models

from kvkeep.bench.serving import prompts
from kvkeep.bench.serving.answers import Answer
from kvkeep.bench.serving.client import CHAT, COMPLETIONS, Call
from kvkeep.bench.serving.running import arrivals, offer
from kvkeep.schema import ConfigError


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
