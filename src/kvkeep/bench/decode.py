"""Decoding on a CPU: a turn of the engine beside the sum of its parts, beside transformers'
``generate``, and with a prefix in common beside without.

The demo's target in float32, greedy, on one thread, over prompts of 1,024 tokens in the mean. Those
of different lengths ``generate`` pads and masks; those of one length it need not. Sides take turns:
whole generations in rounds, and single steps one by one, for which ``generate`` gets a stopping
criterion that stops nothing and takes a turn of ours.
"""

from __future__ import annotations

import itertools
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
from ..models.attention.device import attention_on
from ..models.attention.interface import Part, Scoring
from .measure import Row, Step, interleaved, one_thread, row, seconds

BATCHES = (8, 32)
MIXED, EQUAL = (512, 1536), (1024, 1024)  # tokens of the shortest prompt and of the longest
PREFIX = 768  # tokens that prompts of one length begin with in common
NEW = 64  # tokens of a whole generation
PAGE = 64
WARM_UP = 3  # steps

Prompts = Sequence[list[int]]

_names = map(str, itertools.count())  # of requests, and of namespaces that nobody shares


def measure(repeats: int, progress: Callable[[], None]) -> list[Row]:
    """Medians of each batch, and of a prefix in common.

    Args:
        repeats: steps of each side, at least 1; and an eighth as many whole generations.
        progress: called after each row.
    """
    rows = list[Row]()

    def add(name: str, ours: float, unit: str, peer: str, value: float) -> None:
        rows.append(row(name, ours, unit, peer, value))
        progress()

    def rates(name: str, tokens: int, peer: str, both: Sequence[float]) -> None:
        add(name, tokens / both[0], "tokens/s", peer, tokens / both[1])

    with one_thread(), torch.inference_mode():
        for batch in BATCHES:
            mixed, equal = (_prompts(batch, lengths) for lengths in (MIXED, EQUAL))
            with _decoding(equal, repeats) as engine:
                whole, *parts = interleaved(_step_and_parts(engine), repeats, WARM_UP)
                peer = "model without attention + attention alone"
                add(f"step, batch {batch}", 1e3 * whole, "ms", peer, 1e3 * sum(parts))
                both, peer = _beside_generate(engine.turn, equal, repeats), "generate"
                rates(f"decode, batch {batch}, equal lengths", batch, peer, both)
            with _decoding(mixed, repeats) as engine:
                both = _beside_generate(engine.turn, mixed, repeats)
                rates(f"decode, batch {batch}, padded", batch, peer, both)
            with _engine(mixed, NEW) as engine:
                sides = [lambda: _run(engine, mixed), _generation(mixed)]  # noqa: B023
                both = interleaved(sides, max(1, repeats // 8))
            rates(f"prefill and {NEW} tokens, batch {batch}, padded", batch * NEW, peer, both)
        most = max(BATCHES)
        equal = _prompts(most, EQUAL)
        with _decoding(equal, repeats, "shared") as one, _decoding(equal, repeats) as other:
            both = interleaved([one.turn, other.turn], repeats, WARM_UP)
        peer = "the same prompts, not shared"
        rates(f"decode, batch {most}, {PREFIX} in common", most, peer, both)
    return rows


def _prompts(batch: int, lengths: tuple[int, int]) -> Prompts:
    """Random tokens; the first are the same in all prompts. The longest prompt comes first."""
    random = np.random.default_rng(0)
    prefix = random.integers(3, 2048, PREFIX).tolist()
    return [
        (prefix + random.integers(3, 2048, length).tolist())[:length]
        for length in np.linspace(lengths[1], lengths[0], batch).round().astype(int)
    ]


@contextmanager
def _engine(prompts: Prompts, new: int) -> Iterator[Engine]:
    """With room for all of ``prompts`` and ``new`` tokens of each."""
    room = len(prompts) * (len(prompts[0]) + new + 2 * PAGE)
    config = EngineConfig(
        model=TARGET, page_size=PAGE, device_tokens=room, host_bytes=0, dtype="float32",
        device="cpu", max_running=len(prompts),
    )  # fmt: skip
    engine = Engine(config)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def _decoding(prompts: Prompts, repeats: int, namespace: str | None = None) -> Iterator[Engine]:
    """An engine each of whose turns makes a token for each prompt.

    Args:
        namespace: where all prompts share what they have in common; None: each in its own.
    """
    new = 2 * (WARM_UP + repeats) + 4 * len(prompts)  # those that come first wait for the last
    with _engine(prompts, new) as engine:
        for tokens in prompts:
            _send(engine, tokens, new, namespace or next(_names))
            engine.turn()
            while not all(seq.decoding for seq in engine.scheduler):
                engine.turn()
        yield engine


def _send(engine: Engine, tokens: list[int], new: int, namespace: str) -> None:
    sampling = Sampling(temperature=0, max_tokens=new, ignore_eos=True)
    name = next(_names)
    engine.send(Generate(id=name, tokens=tokens, sampling=sampling, namespace=namespace))


def _run(engine: Engine, prompts: Prompts) -> None:
    """Whole generations, of which nothing is cached."""
    for tokens in prompts:
        _send(engine, tokens, NEW, next(_names))
    engine.turn()
    while any(True for _ in engine.scheduler):
        engine.turn()


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


def _generation(prompts: Prompts, new: int = NEW, **options: Any) -> Step:
    """transformers' ``generate`` over the padded prompts."""
    import transformers

    longest = max(len(tokens) for tokens in prompts)
    padded = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens in prompts])
    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return lambda: model.generate(padded, attention_mask=padded.sign(), **options)


def _beside_generate(turn: Step, prompts: Prompts, repeats: int) -> list[float]:
    """Median seconds of a turn, and of a step of ``generate``."""
    taken, end = [], 0.0

    def between(tokens: Tensor, _scores: object) -> Tensor:
        nonlocal end
        theirs = time.perf_counter() - end
        taken.append((seconds(turn), theirs))
        end = time.perf_counter()
        return torch.zeros(len(tokens), dtype=torch.bool)

    _generation(prompts, WARM_UP + repeats, stopping_criteria=[between])()
    return [median(times) for times in zip(*taken[WARM_UP:], strict=True)]
