"""Decoding on a CPU: a turn of the engine beside the sum of its parts, beside transformers'
``generate``, and with a prefix in common beside without.

The demo's target in float32, greedy, on one thread. The sides take turns step by step: ``generate``
gets a stopping criterion that stops nothing and takes a turn of ours. Prompts have 1,024 tokens in
the mean. Those of different lengths ``generate`` pads and masks; those of one length it need not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..demo.run import TARGET
from ..engine.config import EngineConfig
from ..engine.core import Engine
from ..engine.messages import Generate, Sampling
from ..models.attention import Part, Scoring, attention_on

BATCHES = (8, 32)
MIXED, EQUAL = (512, 1536), (1024, 1024)  # tokens of the shortest prompt and of the longest
PREFIX = 768  # tokens that prompts of one length begin with in common
PAGE = 64
WARM_UP = 3  # steps

Step = Callable[[], object]
Prompts = Sequence[list[int]]


def measure(repeats: int, progress: Callable[[], None]) -> list[dict[str, Any]]:
    """Rows of name, ours, unit, peer, peer_value and ratio (ours / peer); medians over steps.

    Args:
        repeats: steps of each side, at least 1.
        progress: called after each row.
    """
    rows = []

    def add(name: str, ours: float, unit: str, peer: str, value: float) -> None:
        both = {"peer": peer, "peer_value": value, "ratio": ours / value}
        rows.append({"name": name, "ours": ours, "unit": unit} | both)
        progress()

    with _one_thread(), torch.inference_mode():
        for batch in BATCHES:
            mixed, equal = (_prompts(batch, lengths) for lengths in (MIXED, EQUAL))
            with _decoding(equal, repeats) as engine:
                whole, *parts = _interleaved(_step_and_parts(engine), repeats)
                peer = "model without attention + attention alone"
                add(f"step, batch {batch}", 1e3 * whole, "ms", peer, 1e3 * sum(parts))
                name, peer = f"decode, batch {batch}", "transformers generate"
                ours, theirs = _beside_generate(engine.turn, equal, repeats)
                add(f"{name}, equal lengths", batch / ours, "tokens/s", peer, batch / theirs)
            with _decoding(mixed, repeats) as engine:
                ours, theirs = _beside_generate(engine.turn, mixed, repeats)
                add(f"{name}, padded", batch / ours, "tokens/s", peer, batch / theirs)
        with _decoding(equal, repeats, "shared") as one, _decoding(equal, repeats) as other:
            ours, theirs = _interleaved([one.turn, other.turn], repeats)
        peer = "the same prompts, not shared"
        add(f"{name}, {PREFIX} in common", batch / ours, "tokens/s", peer, batch / theirs)
    return rows


def _prompts(batch: int, lengths: tuple[int, int]) -> Prompts:
    """Random tokens, at first the same as long as all prompts go on after. The longest is first."""
    random = np.random.default_rng(0)
    text = random.integers(3, 2048, lengths[1])
    prompts = []
    for length in np.linspace(lengths[1], lengths[0], batch).round().astype(int):
        own = max(0, length - PREFIX)
        prompts.append([*text[: length - own].tolist(), *random.integers(3, 2048, own).tolist()])
    return prompts


@contextmanager
def _decoding(prompts: Prompts, repeats: int, namespace: str | None = None) -> Iterator[Engine]:
    """An engine each of whose turns makes a token for each prompt.

    Args:
        namespace: where all prompts share what they have in common; None: each in its own.
    """
    new = 2 * (WARM_UP + repeats) + 4 * len(prompts)  # those that come first wait for the last
    room = (len(prompts) + 1) * (len(prompts[0]) + new + PAGE)
    config = EngineConfig(
        model=TARGET, page_size=PAGE, device_tokens=room, host_bytes=0, dtype="float32",
        device="cpu", max_running=len(prompts),
    )  # fmt: skip
    sampling = Sampling(temperature=0, max_tokens=new, ignore_eos=True)
    engine = Engine(config)
    try:
        for i, tokens in enumerate(prompts):
            where = f"{i}" if namespace is None else namespace
            engine.send(Generate(id=f"{i}", tokens=tokens, sampling=sampling, namespace=where))
            engine.turn()
            while not all(seq.decoding for seq in engine.scheduler):
                engine.turn()
        yield engine
    finally:
        engine.close()


def _step_and_parts(engine: Engine) -> list[Step]:
    """A turn of the engine; transformers' model over as many rows that attend to nothing; and the
    same attention in all layers, planned before, over pages in random slots."""
    import transformers

    transformers.AttentionInterface.register("nothing", _nothing)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        TARGET, dtype=torch.float32, attn_implementation="nothing"
    )
    starts = [seq.computed for seq in engine.scheduler]
    tokens, positions = torch.arange(len(starts))[None], torch.tensor(starts)[None]
    config = model.config
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    pages = max(starts) // PAGE + 1
    slots = np.random.default_rng(0).permutation(len(starts) * pages).astype(np.int32)
    tables = slots.reshape(len(starts), pages)
    pools = torch.randn(config.num_hidden_layers, 2, len(slots), PAGE, kv_heads, dim)
    parts = [Part(table, start, 1) for table, start in zip(tables, starts, strict=True)]
    plan = attention_on(torch.device("cpu")).plan(parts, PAGE)
    query, scoring = torch.randn(len(starts), heads, dim), Scoring(dim**-0.5)
    return [
        engine.turn,
        lambda: model(input_ids=tokens, position_ids=positions, use_cache=False),
        lambda: [plan.attend(query, keys, values, scoring) for keys, values in pools],
    ]


def _nothing(_module: object, query: Tensor, *_args: object, **_options: object) -> Any:
    return query.transpose(1, 2), None


def _beside_generate(turn: Step, prompts: Prompts, repeats: int) -> tuple[float, float]:
    """Median seconds of a turn, and of a step of ``generate`` over the padded prompts."""
    import transformers

    ours, theirs = [], []
    end = 0.0

    def between(tokens: Tensor, _scores: object) -> Tensor:
        nonlocal end
        theirs.append(time.perf_counter() - end)
        ours.append(_seconds(turn))
        end = time.perf_counter()
        return torch.zeros(len(tokens), dtype=torch.bool)

    longest = max(len(tokens) for tokens in prompts)
    padded = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in prompts])
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=WARM_UP + repeats, do_sample=False, pad_token_id=0
    )
    model.generate(padded, attention_mask=padded.sign(), stopping_criteria=[between])
    return median(ours[WARM_UP:]), median(theirs[WARM_UP:])


def _interleaved(steps: Sequence[Step], repeats: int) -> list[float]:
    """Median seconds of each."""
    taken = [[_seconds(step) for step in steps] for _ in range(WARM_UP + repeats)]
    return [median(times) for times in zip(*taken[WARM_UP:], strict=True)]


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


@contextmanager
def _one_thread() -> Iterator[None]:
    """Faster than several for a model as small as this."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
