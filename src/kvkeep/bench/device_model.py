"""A model of the shape of Llama 3.1 8B with random weights on a CUDA device, and what takes time.

Times are of the host, from telling the device to its having done everything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from ..models.base import Run
from ..models.graphs import Graphs
from ..models.hf import adopt
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
    """The model twice, with different weights: served by us, and as transformers runs it."""

    def __init__(self) -> None:
        import transformers

        shape = {**json.loads(CONFIG.read_text()), "max_position_embeddings": 2 * PREFIX}
        with torch.device("cuda"):
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
        return Memory(self.schema, [device], [host], "cuda", backend=backend)


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
    """Tokens per second of one sequence after a prompt of 1k: recorded steps beside ``generate``'s,
    which gets a stopping criterion that stops nothing and takes a step of ours.

    Args:
        peer: "generate", or what else is in :data:`PEERS`.
    """
    import transformers

    step, end = _decoding(llama), 0.0
    ours: list[float] = []
    theirs: list[float] = []

    def between(tokens: Tensor, _scores: object) -> Tensor:
        nonlocal end
        torch.cuda.synchronize()
        theirs.append(time.perf_counter() - end)
        ours.append(seconds(step))
        end = time.perf_counter()
        return torch.zeros(len(tokens), dtype=torch.bool, device="cuda")

    prompt = torch.randint(llama.target.vocab_size, (1, PROMPT), device="cuda")
    llama.theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=WARM_UP + STEPS, do_sample=False, pad_token_id=0, **PEERS[peer]
        ),
        stopping_criteria=[between],
    )
    mine, other = (1 / median(taken[WARM_UP:]) for taken in (ours, theirs))
    return row(f"decode, batch 1, {PROMPT} tokens", mine, "tokens/s", peer, other)


PEERS: dict[str, dict[str, Any]] = {
    "generate": {},
    "generate, static cache, compiled": {"cache_implementation": "static"},
}
"""transformers' own ways, and their settings."""


def _decoding(llama: Llama) -> Step:
    """Makes one token of a sequence, by a recording."""
    pages = -(-(PROMPT + 2 * (WARM_UP + STEPS)) // PAGE)
    memory, tables = llama.memory(pages, 0), Pages(_scattered(pages, 0))
    llama.target.graphs = Graphs()
    at, tokens = 0, torch.randint(llama.target.vocab_size, (PROMPT,), device="cuda")

    @torch.inference_mode()
    def step() -> None:
        nonlocal at, tokens
        run = Run(tables, at, len(tokens), keep=1)
        logits, _ = llama.target.forward(tokens, [run], memory.pools)
        at, tokens = at + len(tokens), logits.argmax(-1)
        torch.cuda.synchronize()

    step()
    return step


def _scattered(pages: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).permutation(pages).astype(np.int32)
