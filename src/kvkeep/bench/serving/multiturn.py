"""``kvkeep bench multiturn``: clients whose conversations grow, round by round.

The load and its options follow SGLang's benchmark/hicache/bench_multiturn.py: in each round a
client sends its history and a new message; the answer becomes a part of its history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .answers import Answer
from .client import Call, Client, Target, clock, connected
from .figures import Flat, summarise
from .plots import draw, multiturn_panels
from .prompts import IdSource, PlainSource, Source, WordSource, read_tokenizer
from .running import Outputs, Send, check_rate, exit_code, finished, progress, until
from .show import ROUND, SUMMARY, console, number, print_failures, print_rows, rows

PROBE_TOKENS = 8  # of a prompt that finds out whether a server takes and returns token ids

Pop = Callable[[int, np.random.Generator], int]
"""The index of the client to send next, out of so many that wait, the first come first."""

POLICIES: dict[str, Pop] = {
    "random": lambda waiting, random: int(random.integers(waiting)),
    "fifo": lambda waiting, random: 0,
}
"""Ready-queue policies by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Talks:
    """Conversations, and when their requests are sent. Defaults are those of SGLang's benchmark."""

    num_clients: int = 256
    num_rounds: int = 5
    request_length: int = 512  # tokens of each message
    output_length: int = 64  # tokens of each answer
    max_parallel: int = 128  # requests that run at a time
    request_rate: float = 1.0  # requests per second; infinity: as soon as they may
    ready_queue_policy: str = "random"
    enable_round_barrier: bool = False  # a round starts when the one before it has ended
    seed: int = 1
    tokenizer: Path | None = None  # directory; None: token ids if the server returns them
    vocab_size: int = 1000  # such ids are below it


@dataclass(slots=True)
class Speaker:
    """One client. Its messages do not depend on when it sends them."""

    messages: Sequence[Any]  # of each round: text or token ids
    history: Any  # what was said so far, in the same form
    round: int = 0  # that comes next


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, answered or failed."""

    round: int
    answer: Answer


class Conversations:
    """Sends the rounds of all clients. Of one event loop.

    Args:
        random: draws the gaps between requests, and the order if the policy is random.
        done: is called with each turn as it ends.
    """

    def __init__(
        self,
        talks: Talks,
        source: Source[Any],
        random: np.random.Generator,
        send: Send,
        done: Callable[[Turn], None],
    ) -> None:
        self._talks, self._source, self._random = talks, source, random
        self._send, self._done = send, done
        self._pop = POLICIES[talks.ready_queue_policy]
        self._ready: list[Speaker] = []  # who may send; the first has waited longest
        for _ in range(talks.num_clients):
            messages = [source.draw(talks.request_length) for _ in range(talks.num_rounds)]
            self._ready.append(Speaker(messages, source.draw(0)))
        self._ended: list[Speaker] = []  # who waits for the others' round to end
        self._running = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Send everything; return when all is answered."""
        talks = self._talks
        due = clock()
        async with asyncio.TaskGroup() as group:
            for _ in range(talks.num_clients * talks.num_rounds):
                await until(due)
                while not self._ready or self._running == talks.max_parallel:
                    self._changed.clear()
                    await self._changed.wait()
                speaker = self._ready.pop(self._pop(len(self._ready), self._random))
                self._running += 1
                group.create_task(self._turn(speaker))
                due = clock() + float(self._random.exponential(1 / talks.request_rate))

    async def _turn(self, speaker: Speaker) -> None:
        """One request of ``speaker``. A turn that fails leaves no trace in the history."""
        prompt = speaker.history + speaker.messages[speaker.round]
        known = len(prompt) if isinstance(prompt, list) else None
        answer = await self._send(Call({"prompt": prompt}, self._talks.output_length, known))
        if not answer.error:
            speaker.history = prompt + self._source.said(answer)
        self._done(Turn(speaker.round, answer))
        speaker.round += 1
        self._running -= 1
        if speaker.round < self._talks.num_rounds:
            self._ended.append(speaker)
            barrier = self._talks.num_clients if self._talks.enable_round_barrier else 1
            if len(self._ended) == barrier:
                self._ready += self._ended
                self._ended = []
        self._changed.set()


async def source_for(talks: Talks, client: Client, random: np.random.Generator) -> Source[Any]:
    """Text of exact lengths with a tokenizer; token ids if the server returns them; else words.

    Token ids keep a history exact. Encoding the text of an answer may give other tokens than were
    generated, and the prefix hit ends there.
    """
    if talks.tokenizer is not None:
        return WordSource(random, read_tokenizer(talks.tokenizer), special=False)
    ids = IdSource(random, talks.vocab_size)
    answer = await client.send(Call({"prompt": ids.draw(PROBE_TOKENS)}, 1))
    return ids if answer.tokens else PlainSource(random)


def run(target: Target, talks: Talks, outputs: Outputs) -> int:
    """Hold ``talks`` with ``target``, print a table, write ``outputs``; return the exit code.

    Raises:
        ConfigError: the server does not answer at all, or a file cannot be read or written.
    """
    outputs.check()
    check_rate(talks.request_rate)
    messages, timing = np.random.default_rng(talks.seed).spawn(2)
    turns: list[Turn] = []
    total = talks.num_clients * talks.num_rounds

    async def work() -> None:
        nonlocal target
        async with connected(target) as client:
            target = client.target
            source = await source_for(talks, client, messages)
            with progress(total, "bench multiturn") as show:

                def done(turn: Turn) -> None:
                    turns.append(turn)
                    show(turn.answer)

                await Conversations(talks, source, timing, client.send, done).run()

    whole = finished(work())
    summary = summarise(turn.answer for turn in turns)
    by_round = [[t.answer for t in turns if t.round == n] for n in range(talks.num_rounds)]
    rounds = [round_figures(n, answers) for n, answers in enumerate(by_round, 1) if answers]
    figures = summary.flat() | {"unfinished": total - len(turns) or None}
    out = console()
    heads = [title.replace(" ", "\n") for title, _ in ROUND.values()]
    cells = [[number(each[name], digits) for name, (_, digits) in ROUND.items()] for each in rounds]
    print_rows(out, f"{target.model} at {target.root}", heads, cells)
    print_rows(out, "", ("", ""), rows(SUMMARY, [figures]))
    print_failures(out, summary.messages)
    outputs.write_lines([{"tag": outputs.tag} | each for each in rounds])
    found = {"summary": figures, "quantiles": summary.quantiles(), "rounds": rounds}
    written = outputs.write("multiturn", target, talks, found)
    if outputs.plot is not None:
        draw(multiturn_panels([(outputs.tag or target.model, written)]), outputs.plot)
    return exit_code(whole, summary.completed)


def round_figures(number: int, answers: Sequence[Answer]) -> Flat:
    """The figures of one round, which lasts from its first request to its last answer."""
    flat = summarise(answers).flat()
    return {
        "round": number,
        "completed": flat["completed"],
        "failed": flat["failed"],
        "prompt_tokens": flat["total_input_tokens"],
        "cached_tokens": flat["total_cached_tokens"],
        "cached_tokens_by_tier": flat["cached_tokens_by_tier"],
        "hit_rate": flat["cache_hit_rate"],
        "mean_ttft_ms": flat["mean_ttft_ms"],
        "p90_ttft_ms": flat["p90_ttft_ms"],
        "mean_latency_ms": flat["mean_e2e_latency_ms"],
        "p90_latency_ms": flat["p90_e2e_latency_ms"],
        "duration": flat["duration"],
        "request_throughput": flat["request_throughput"],
        "output_tokens": flat["total_output_tokens"],
        "output_throughput": flat["output_throughput"],
        "accept_length": flat["accept_length"],
    }
