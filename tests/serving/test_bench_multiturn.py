"""kvkeep bench multiturn"""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_runs import answer, bench, cached
from stub_server import Reply, event, serving

from kvkeep.bench.serving import prompts
from kvkeep.bench.serving.answers import Answer
from kvkeep.bench.serving.client import Call
from kvkeep.bench.serving.multiturn import POLICIES, Conversations, Talks, Turn, round_figures
from kvkeep.schema import ConfigError


class Talker:
    """Answers each call with the tokens 1 and 2, and notes what ran at a time."""

    def __init__(self, fail: tuple[int, ...] = ()) -> None:
        self.prompts: list[list[int]] = []
        self.turns: list[Turn] = []
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
