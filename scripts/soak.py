"""Soak test: a server with tiny pools under mixed traffic, checked for leaks.

A ``kvkeep serve`` process with write-through to storage serves a sliding-window variant of the
demo's target (the same weights, with windows on three of four layers) and the demo's draft. Clients
send multi-turn conversations, repeated prompts and streams that they cancel. At the end, four
checks must hold: no request failed; no lease or prefetch is left; the resident set is flat; the
accept length of repeated prompts in the last minute is within 2% of that in the second minute.

    python -m scripts.soak --minutes 30 --json soak.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

import openai
import torch
from rich.progress import Progress
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvkeep.demo.process import Server
from kvkeep.demo.run import DRAFT, TARGET, prompts

WINDOW, SESSIONS, PAGE = 128, 10, 64


def save_window_model(directory: Path) -> None:
    """Save the demo's target as a Qwen2 model with a window of 128 tokens on three layers.

    The layer with the induction heads, which copies the prompt, keeps full attention.
    """
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    kept = model.config.to_dict()
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
        "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings",
        "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    )  # fmt: skip
    window, full = "sliding_attention", "full_attention"
    config = Qwen2Config(
        **{name: kept[name] for name in names},
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=[window, full, window, window],
    )
    windowed = Qwen2ForCausalLM(config)
    weights = model.state_dict()
    windowed.load_state_dict(  # Qwen2 has biases where Llama has none: set them to zero
        {k: weights.get(k, torch.zeros_like(v)) for k, v in windowed.state_dict().items()}
    )
    windowed.save_pretrained(directory)
    for file in TARGET.glob("tokenizer*"):
        (directory / file.name).write_bytes(file.read_bytes())


@dataclass
class Log:
    """Measurements of one soak."""

    requests: int = 0
    cancelled: int = 0
    errors: list[str] = field(default_factory=list)
    accepted: list[tuple[float, float]] = field(default_factory=list)  # time in s, accept length
    resident: list[tuple[float, int]] = field(default_factory=list)  # time in s, resident KiB


class Traffic:
    """Sends requests of all kinds for ``seconds``."""

    def __init__(self, client: openai.AsyncOpenAI, model: str, seconds: float) -> None:
        self._client, self._model = client, model
        self._begin, self._seconds = time.monotonic(), seconds
        self.log = Log()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    async def run(self) -> None:
        """Run all sessions and the repeated prompts until time is up."""
        sessions = [self._converse(random.Random(i)) for i in range(SESSIONS)]
        await asyncio.gather(*sessions, self._repeat())

    async def _converse(self, rng: random.Random) -> None:
        """Run multi-turn conversations; cancel about every fifth stream."""
        shared = [2 + i for i in range(3 * PAGE)]  # a system prompt
        history: list[int] = []
        while self.now < self._seconds:
            if len(history) > 1200 or not history:
                history = shared + [rng.randrange(2, 2048) for _ in range(rng.randrange(200))]
            block = [rng.randrange(2, 2048) for _ in range(rng.randrange(20, 60))]
            history += block + block[: rng.randrange(1, 20)]
            cancel_after = rng.randrange(1, 10) if rng.random() < 0.2 else None
            history += await self._stream(history, rng.randrange(10, 120), cancel_after)

    async def _repeat(self) -> None:
        """Send the demo's prompts in turn, over and over."""
        while self.now < self._seconds:
            for prompt in prompts():
                if self.now < self._seconds:
                    await self._once(prompt.tokens)
                    await asyncio.sleep(0.5)

    async def _stream(self, tokens: list[int], count: int, cancel_after: int | None) -> list[int]:
        self.log.requests += 1
        got: list[int] = []
        try:
            stream = await self._client.completions.create(
                model=self._model, prompt=tokens, max_tokens=count, temperature=0.7, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for event in stream:
                got += event.choices[0].token_ids if event.choices else []
                if cancel_after is not None and len(got) >= cancel_after:
                    self.log.cancelled += 1
                    await stream.close()
                    break
        except openai.OpenAIError as error:
            self.log.errors.append(repr(error))
        return got

    async def _once(self, tokens: list[int]) -> None:
        self.log.requests += 1
        try:
            answer = await self._client.completions.create(
                model=self._model, prompt=tokens, max_tokens=100, temperature=0,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            self.log.accepted.append((self.now, answer.kvkeep["accept_length"]))
        except openai.OpenAIError as error:
            self.log.errors.append(repr(error))


def resident(pid: int) -> int:
    """The resident set of a process in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def children(pid: int) -> list[int]:
    """Process ids of a process's children: of a server's, its engine."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # each thread has its own
    return [int(child) for one in lists for child in one.read_text().split()]


async def watch(traffic: Traffic, server: Server, seconds: float) -> None:
    """Record the resident set of server and engine every 5 s, and show progress."""
    with Progress() as progress:
        task = progress.add_task("soaking", total=seconds)
        while traffic.now < seconds:
            size = sum(map(resident, [server.pid, *children(server.pid)]))
            traffic.log.resident.append((traffic.now, size))
            status_line = f"{traffic.log.requests} requests, {len(traffic.log.errors)} errors"
            progress.update(task, completed=traffic.now, description=status_line)
            await asyncio.sleep(5)


def verdict(log: Log, seconds: float, held: dict[str, float]) -> list[tuple[str, bool]]:
    """Each check in words, and whether it holds.

    Args:
        seconds: duration of the soak.
        held: gauges of the idle server that must be zero.
    """
    early = [length for at, length in log.accepted if 60 <= at < 120 or seconds < 180]
    late = [length for at, length in log.accepted if at >= seconds - 60]
    third = seconds / 3
    before = median([size for at, size in log.resident if third <= at < 2 * third])
    after = median([size for at, size in log.resident if at >= 2 * third])
    first, last = fmean(early), fmean(late)
    return [
        (f"{log.requests} requests, {log.cancelled} cancelled, no error", not log.errors),
        (f"the idle server holds nothing: {held}", not any(held.values())),
        (
            f"resident set is flat: {before / 1024:.0f} MiB in the second third, "
            f"{after / 1024:.0f} MiB in the last",
            after < 1.02 * before,
        ),
        (
            f"accept length of repeated prompts is stable: {first:.2f} in the second minute, "
            f"{last:.2f} in the last",
            abs(first - last) <= 0.02 * first,
        ),
    ]


def main() -> None:
    """Run the soak; exit with code 1 if a check fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--json", type=Path, help="write all measurements to this file")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="kvkeep-soak-") as scratch:
        model = Path(scratch) / "windowed"
        save_window_model(model)
        server = Server([
            str(model), "--draft", str(DRAFT), "--speculative-num-steps", "7",
            "--max-total-tokens", "6144", "--hicache-ratio", "1.5", "--chunked-prefill-size", "256",
            "--hicache-storage-backend", "file", "--hicache-storage-dir", f"{scratch}/storage",
            "--hicache-storage-size", "0.1",
        ])  # fmt: skip
        try:
            server.wait()
            client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
            traffic = Traffic(client, model.name, seconds)

            async def soak() -> None:
                await asyncio.gather(traffic.run(), watch(traffic, server, seconds))

            asyncio.run(soak())
            time.sleep(3)
            names = ("leases", "prefetches", "running_requests", "waiting_requests")
            held = {name: server.metric(f"kvkeep_{name}") for name in names}
            held["errors"] = server.metric("kvkeep_invariant_errors_total")
        finally:
            server.stop()
    claims = verdict(traffic.log, seconds, held)
    for claim, holds in claims:
        print(f"{'holds' if holds else 'FAILS'}  {claim}")
    if options.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        seen = {"commit": commit.stdout.strip(), "held": held, **asdict(traffic.log)}
        options.json.write_text(json.dumps(seen))
    sys.exit(not all(holds for _, holds in claims))


if __name__ == "__main__":
    main()
