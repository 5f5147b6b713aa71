"""A model of the shape of Llama 3.1 8B with random weights on a CUDA device, and what takes time.

Times are of the host, from telling the device to its having done everything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..media.arrival import Arrival
from ..media.base import Copy
from ..media.memory import Memory
from ..models.graphs import Graphs
from ..models.passes import Run
from ..models.target.hf import adopt
from ..schema import Identity, Schema
from .measure import Row, Step, interleaved, row, seconds

CONFIG = Path(__file__).parents[3] / "docs" / "configs" / "llama-3.1-8b.json"
PAGE, PROMPT = 64, 1024  # tokens
PREFIX, CHUNK = 16_384, 2_048  # tokens: loaded, and computed meanwhile
WARM_UP, STEPS = 8, 48  # of decoding


@dataclass(frozen=True)
class Pages:
    """Tables of a sequence whose pages lie in random slots."""

    table: NDArray[np.int32]
    arriving: Sequence[Arrival] = ()

    def slots(self, group: str) -> NDArray[np.int32]:
        return self.table

    def working(self, group: str) -> NDArray[np.int32]:
        return self.table[:0]


class Llama:
    """The model twice, with different weights: served by us, and as transformers runs it.

    Args:
        changes: to its shape.
    """

    def __init__(self, device: str = "cuda", **changes: float) -> None:
        import transformers

        shape = {**json.loads(CONFIG.read_text()), "max_position_embeddings": 2 * PREFIX, **changes}
        with torch.device(device):
            ours, self.theirs = (
                transformers.AutoModelForCausalLM.from_config(
                    transformers.LlamaConfig(**shape),
                    dtype=torch.bfloat16,
                    attn_implementation=kind,
                )
                for kind in ("eager", "sdpa")
            )
        self.theirs.eval()
        self.target = adopt(ours)
        self.schema = Schema(Identity("random"), PAGE, self.target.groups(PAGE))

    def memory(self, device: int, host: int, backend: str = "direct") -> Memory:
        """Pools and arenas of so many pages."""
        where = self.target.device.type
        return Memory(self.schema, [device], [host], where, backend=backend)


@torch.inference_mode()
def hidden_load(llama: Llama, backend: str, turns: int) -> Row:
    """How much of the time that a prefix takes from the host is hidden behind the prefill of what
    follows it, whose layers wait for their own part of the load alone."""
    loaded, pages = PREFIX // PAGE, (PREFIX + CHUNK) // PAGE
    memory = llama.memory(pages, loaded, backend)
    table, arena = (_scattered(n, seed) for seed, n in enumerate((pages, loaded)))
    copies = [Copy(0, arena, table[:loaded])]
    tokens = torch.randint(llama.target.vocab_size, (CHUNK,), device="cuda")

    def prefill(arriving: Sequence[Arrival] = ()) -> None:
        run = Run(Pages(table, arriving), PREFIX, CHUNK, keep=1)
        llama.target.forward(tokens, [run], memory.pools)
        torch.cuda.synchronize()

    def both() -> None:
        arrival = Arrival()
        lane = Thread(target=memory.load, args=(copies, (), arrival.reach))
        lane.start()
        prefill([arrival])
        lane.join()

    load, alone, together = interleaved((lambda: memory.load(copies), prefill, both), turns, 1)
    name = f"{PREFIX >> 10}k tokens loaded behind a prefill of {CHUNK >> 10}k, {backend}"
    return row(name, 1e3 * (load + alone - together), "ms hidden", "the load alone", 1e3 * load)


def decode(llama: Llama, peer: str) -> Row:
    """Tokens per second of one sequence after a prompt of 1k, by a bare loop: forward, argmax, and
    the host reads the token. An engine does more in a step, and so does ``generate``.

    Args:
        peer: one of :data:`PEERS`.
    """
    prompt = torch.randint(llama.target.vocab_size, (1, PROMPT), device=llama.target.device)
    step = _loop(llama, prompt[0])
    assert llama.target.graphs is not None
    mine, other = PEERS[peer](llama, prompt, step)
    how = "recorded" if llama.target.graphs.recorded else "NOT recorded"
    name = f"forward and argmax, batch 1, {PROMPT} tokens, {how}"
    return row(name, 1 / mine, "tokens/s", peer, 1 / other)


def _loop(llama: Llama, prompt: Tensor) -> Step:
    """Makes one token of a sequence, by a recording."""
    pages = -(-(PROMPT + 2 * (WARM_UP + STEPS)) // PAGE)
    memory, tables = llama.memory(pages, 0), Pages(_scattered(pages, 0))
    llama.target.graphs = Graphs()
    at, tokens = 0, prompt

    @torch.inference_mode()
    def step() -> object:
        nonlocal at, tokens
        run = Run(tables, at, len(tokens), keep=1)
        logits, _ = llama.target.forward(tokens, [run], memory.pools)
        at, tokens = at + len(tokens), logits.argmax(-1)
        return tokens.item()

    step()
    return step


def transformers_loop(llama: Llama, prompt: Tensor, new: int) -> Step:
    """The same by transformers' model: a static cache, and all but the prompt is compiled."""
    import transformers

    model = llama.theirs
    cache = transformers.StaticCache(config=model.config, max_cache_len=prompt.shape[1] + new)
    forward, tokens = model, prompt

    @torch.no_grad()
    def step() -> object:
        nonlocal forward, tokens
        logits = forward(input_ids=tokens, past_key_values=cache, logits_to_keep=1).logits
        forward, tokens = model.get_compiled_call(None), logits[:, -1].argmax(-1, keepdim=True)
        return tokens.item()

    return step


def _beside_loop(llama: Llama, prompt: Tensor, step: Step) -> list[float]:
    """Median seconds of ``step``, and of one of :func:`transformers_loop`."""
    theirs = transformers_loop(llama, prompt, WARM_UP + STEPS)
    return interleaved((step, theirs), STEPS, WARM_UP)


def _beside_generate(llama: Llama, prompt: Tensor, step: Step, **options: Any) -> list[float]:
    """Median seconds of ``step``, and of a turn of ``generate``'s loop, which gets a stopping
    criterion that stops nothing and takes a step of ours."""
    import transformers

    taken, end = list[tuple[float, float]](), 0.0

    def between(tokens: Tensor, _scores: object) -> Tensor:
        nonlocal end
        tokens[0, -1].item()
        theirs = time.perf_counter() - end
        taken.append((seconds(step), theirs))
        end = time.perf_counter()
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    llama.theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=WARM_UP + STEPS, do_sample=False, pad_token_id=0, **options
        ),
        stopping_criteria=[between],
    )
    return [median(times) for times in zip(*taken[WARM_UP:], strict=True)]


PEERS: dict[str, Callable[[Llama, Tensor, Step], list[float]]] = {
    "generate, its whole loop": _beside_generate,
    "generate, its whole loop, static cache, compiled": partial(
        _beside_generate, cache_implementation="static"
    ),
    "transformers' model, the same loop, static cache, compiled": _beside_loop,
}
"""transformers' own ways: median seconds of a step of ours, and of theirs."""


def _scattered(pages: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).permutation(pages).astype(np.int32)
