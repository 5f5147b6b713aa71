"""``kvkeep bench serve``: the usual report on a server under a load of single requests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from .answers import Answer
from .client import Call, Target, connected
from .figures import Flat, per, summarise
from .plots import draw, serve_panels
from .prompts import IdSource, WordSource, file_calls, lengths, random_calls, read_tokenizer
from .running import Outputs, arrivals, exit_code, finished, offer, progress
from .show import SUMMARY, console, print_failures, print_rows, rows
from .speculation import speculation

RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests and when they are due. Defaults are those of SGLang's benchmark."""

    dataset: str = RANDOM  # or the path of a file of requests
    num_prompts: int = 1000
    random_input_len: int = 1024  # tokens of a prompt, at most
    random_output_len: int = 1024  # tokens of an answer, at most
    random_range_ratio: float = 0.0  # the least length / the greatest
    request_rate: float = float("inf")  # requests per second
    max_concurrency: int | None = None  # requests that run at a time; None: any number
    seed: int = 42
    tokenizer: Path | None = None  # directory; None: prompts are token ids
    vocab_size: int = 1000  # ids of such prompts are below it

    def calls(self, random: np.random.Generator) -> list[Call]:
        """The requests.

        Raises:
            ConfigError: a file cannot be read, or the tokenizer makes no such prompts.
        """
        if self.dataset != RANDOM:
            return file_calls(Path(self.dataset), self.num_prompts, self.random_output_len)
        ratio, count = self.random_range_ratio, self.num_prompts
        inputs = lengths(self.random_input_len, ratio, count, random)
        outputs = lengths(self.random_output_len, ratio, count, random)
        if self.tokenizer is None:
            return random_calls(IdSource(random, self.vocab_size), inputs, outputs)
        source = WordSource(random, read_tokenizer(self.tokenizer), special=True)
        return random_calls(source, inputs, outputs)


def run(target: Target, load: Load, outputs: Outputs) -> int:
    """Put ``load`` on ``target``, print the report, write ``outputs``; return the exit code.

    Raises:
        ConfigError: the server does not answer at all, or a file cannot be read or written.
    """
    outputs.check()
    random = np.random.default_rng(load.seed)
    calls = load.calls(random)
    due = arrivals(len(calls), load.request_rate, random)
    answers: dict[int, Answer] = {}  # by index of the call, in the order in which they ended

    told: float | None = None  # accept length, by the server instead of its answers

    async def work() -> None:
        nonlocal target, told
        async with connected(target) as client:
            target = client.target
            before = await speculation(client)
            with progress(len(calls), "bench serve") as show:

                def done(index: int, answer: Answer) -> None:
                    answers[index] = answer
                    show(answer)

                await offer(calls, due, load.max_concurrency, client.send, done)
            told = (await speculation(client)).since(before)

    whole = finished(work())
    summary = summarise(answers.values())
    begin = min((answer.start for answer in answers.values()), default=0.0)
    lines = [request_line(index, due[index], a, begin) for index, a in sorted(answers.items())]
    figures = summary.flat() | {
        "accept_length": told if summary.accept_length is None else summary.accept_length,
        "unfinished": len(calls) - len(answers) or None,
        "mean_wait_ms": per(sum(line["wait_ms"] for line in lines), len(lines)),
    }
    out = console()
    print_rows(out, f"{target.model} at {target.root}", ("", ""), rows(SUMMARY, [figures]))
    print_failures(out, summary.messages)
    outputs.write_lines(lines)
    found = {"summary": figures, "quantiles": summary.quantiles()}
    written = outputs.write("serve", target, load, found)
    if outputs.plot is not None:
        draw(serve_panels([(outputs.tag or target.model, written)]), outputs.plot)
    return exit_code(whole, summary.completed)


def request_line(index: int, due: float, answer: Answer, begin: float) -> Flat:
    """The record of one request, for a file.

    Args:
        due: when it should have been sent, in seconds after ``begin``.
        begin: when the first request was sent, by the client's clock.
    """
    start = answer.start - begin
    return {
        "index": index,
        "due_s": due,
        "start_s": start,
        "wait_ms": 1e3 * max(start - due, 0.0),
        "ttft_ms": None if answer.ttft is None else 1e3 * answer.ttft,
        "latency_ms": 1e3 * answer.latency,
        "itl_ms": [1e3 * (after - before) for before, after in pairwise(answer.times)],
        "prompt_tokens": answer.prompt_tokens,
        "output_tokens": answer.output_tokens,
        "cached_tokens": answer.cached_tokens,
        "cached_tokens_by_tier": dict(answer.tiers),
        "accept_length": answer.accept_length,
        "error": answer.error or None,
        "message": answer.message or None,
    }
