"""Decoding on a CPU: a turn of the engine beside the sum of its parts, beside transformers'
``generate``, and with a prefix in common beside without.

The demo's target in float32, greedy, on one thread. All prompts are equally long, so a padded batch
wastes nothing. The sides take turns step by step: ``generate`` gets a stopping criterion that stops
nothing and takes a turn of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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

PROMPT, PREFIX = 1024, 768  # tokens of a prompt, and how many all may have in common
BATCHES = (8, 32)
PAGE = 64
WARM_UP = 3  # steps

Step = Callable[[], object]


def measure(repeats: int, progress: Callable[[], None]) -> list[dict[str, Any]]:
    """Rows of name, ours, unit, peer, peer_value and ratio (ours / peer); medians over steps.

    Args:
        repeats: steps of each side, at least 1.
        progress: called after each row.
    """
    rows = []
    with _one_thread(), torch.inference_mode():
        for batch in BATCHES:
            with _decoding(batch, repeats, shared=False) as apart:
                rows.append(_beside_parts(apart.turn, batch, repeats))
                progress()
                rows.append(_beside_generate(apart.turn, batch, repeats))
                progress()
                if batch == BATCHES[-1]:
                    with _decoding(batch, repeats, shared=True) as together:
                        rows.append(_beside_unshared(together.turn, apart.turn, batch, repeats))
                    progress()
    return rows


def _beside_parts(turn: Step, batch: int, repeats: int) -> dict[str, Any]:
    """A whole turn of the engine, and the model without attention plus attention without a model."""
    turns, model, attention = _interleaved(
        (turn, _without_attention(batch), _attention_alone(batch)), repeats
    )
    name, peer = f"step, batch {batch}", "model without attention + attention alone"
    return _row(name, 1e3 * turns, "ms", peer, 1e3 * (model + attention))


def _beside_generate(turn: Step, batch: int, repeats: int) -> dict[str, Any]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    ours, theirs = [], []
    end = 0.0

    def between(tokens: Tensor, _scores: object) -> Tensor:
        nonlocal end
        theirs.append(time.perf_counter() - end)
        ours.append(_seconds(turn))
        end = time.perf_counter()
        return torch.zeros(len(tokens), dtype=torch.bool)

    prompts = torch.tensor(_prompts(batch))
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=WARM_UP + repeats, do_sample=False, pad_token_id=0
        ),
        stopping_criteria=[between],
    )
    mine, peers = (batch / median(times[WARM_UP:]) for times in (ours, theirs))
    return _row(f"decode, batch {batch}", mine, "tokens/s", "transformers generate", peers)


def _beside_unshared(together: Step, apart: Step, batch: int, repeats: int) -> dict[str, Any]:
    mine, other = (batch / t for t in _interleaved((together, apart), repeats))
    name = f"decode, batch {batch}, {PREFIX} tokens in common"
    return _row(name, mine, "tokens/s", "the same, not shared", other)


@contextmanager
def _decoding(batch: int, repeats: int, shared: bool) -> Iterator[Engine]:
    """An engine each of whose turns makes a token for each of ``batch`` requests.

    Args:
        shared: they have the pages of their prefix in common, or else none.
    """
    new = 3 * (WARM_UP + repeats) + 2 * batch  # those that come first wait for the last
    config = EngineConfig(
        model=TARGET, page_size=PAGE, device_tokens=(batch + 1) * (PROMPT + new + PAGE),
        host_bytes=0, dtype="float32", device="cpu", max_running=batch,
    )  # fmt: skip
    engine = Engine(config)
    sampling = Sampling(temperature=0, max_tokens=new, ignore_eos=True)
    try:
        for i, tokens in enumerate(_prompts(batch)):
            namespace = "" if shared else str(i)
            engine.send(Generate(id=str(i), tokens=tokens, sampling=sampling, namespace=namespace))
            engine.turn()
            while not all(seq.decoding for seq in engine.scheduler):
                engine.turn()
        yield engine
    finally:
        engine.close()


def _prompts(batch: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    prefix = random.integers(3, 2048, PREFIX).tolist()
    return [prefix + random.integers(3, 2048, PROMPT - PREFIX).tolist() for _ in range(batch)]


def _without_attention(batch: int) -> Step:
    """One pass of transformers' model over ``batch`` rows that attend to nothing."""
    import transformers

    transformers.AttentionInterface.register("nothing", _nothing)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        TARGET, dtype=torch.float32, attn_implementation="nothing"
    )
    tokens, positions = torch.arange(batch)[None], torch.full((1, batch), PROMPT)
    return lambda: model(input_ids=tokens, position_ids=positions, use_cache=False)


def _nothing(_module: object, query: Tensor, *_args: object, **_options: object) -> Any:
    return query.transpose(1, 2), None


def _attention_alone(batch: int) -> Step:
    """The same attention in all layers over pages in random slots, planned before."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(TARGET)
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    pages = PROMPT // PAGE + 1
    slots = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
    pools = [
        torch.randn(2, len(slots), PAGE, kv_heads, dim) for _ in range(config.num_hidden_layers)
    ]
    plan = attention_on(torch.device("cpu")).plan(
        [Part(table, PROMPT, 1) for table in slots.reshape(batch, pages)], PAGE
    )
    query, scoring = torch.randn(batch, heads, dim), Scoring(dim**-0.5)
    return lambda: [plan.attend(query, keys, values, scoring) for keys, values in pools]


def _interleaved(steps: tuple[Step, ...], repeats: int) -> list[float]:
    """Median seconds of each."""
    taken = [[_seconds(step) for step in steps] for _ in range(WARM_UP + repeats)]
    return [median(times) for times in zip(*taken[WARM_UP:], strict=True)]


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _row(name: str, ours: float, unit: str, peer: str, value: float) -> dict[str, Any]:
    return {
        "name": name, "ours": ours, "unit": unit,
        "peer": peer, "peer_value": value, "ratio": ours / value,
    }  # fmt: skip


@contextmanager
def _one_thread() -> Iterator[None]:
    """Faster than several for a model as small as this."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
