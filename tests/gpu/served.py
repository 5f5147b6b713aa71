"""Greedy decoding of a target on a cache: a minimal engine for the tests on a device.

These tests need only PyTorch, Triton, transformers and what the cache itself imports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import KINDS, PAGE, save_target
from torch import Tensor

from kvkeep.core.cache import Cache
from kvkeep.core.lease import Lease
from kvkeep.core.policy import Policy
from kvkeep.media.memory import Memory
from kvkeep.models.passes import Run
from kvkeep.models.target.hf import load_target
from kvkeep.models.target.model import Target
from kvkeep.schema import Identity, Schema
from kvkeep.stores.file import FileStore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device"),
]
SLOTS = 64


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(3, 128, length).tolist()


def load(directory: Path, kind: str = "llama", dtype: str = "float32") -> Target:
    """A tiny random model on the device."""
    family, overrides = KINDS[kind]
    if not directory.exists():
        save_target(directory, family, **overrides)
    return load_target(directory, dtype, DEVICE)


class Served:
    """Serves one prompt at a time from a cache with device, host and optional storage tiers."""

    def __init__(
        self,
        target: Target,
        storage: Path | None = None,
        layout: str = "page_first",
        backend: str = "direct",
    ) -> None:
        schema = Schema(Identity(target.digest), PAGE, target.groups(PAGE))
        slots = [SLOTS] * len(schema.groups)
        sizes = {schema.fingerprint(group): group.record_bytes for group in schema.groups}
        store = FileStore(storage, sizes, 1 << 30) if storage else None
        self.memory = Memory(schema, slots, slots, DEVICE, layout, backend)
        policy = Policy(prefetch_min_tokens=0, recompute="never")
        self.cache = Cache(schema, slots, slots, store, policy, self.memory)
        self.target = target
        self.origin: dict[str, int] = {}  # prefix hit of the last prompt, in tokens by tier

    @torch.inference_mode()
    def answer(
        self, prompt: list[int], new: int, wait: bool = True
    ) -> tuple[list[int], dict[str, bytes]]:
        """Return ``new`` greedy tokens, and the bytes of the prompt's whole pages by pool.

        Args:
            wait: True: wait for the whole load before the first step. False: each layer waits for
                its own part.
        """
        tokens = np.array(prompt, np.int32)
        prefetch = self.cache.prefetch(tokens)
        self._until(lambda: self.cache.ready(prefetch))
        lease = self.cache.admit(tokens, chunk=len(tokens), prefetch=prefetch)
        assert lease is not None
        if wait:
            self._until(lambda: lease.ready)
        assert self.cache.grow(lease, len(tokens) + new)
        at = lease.pages * PAGE
        for _ in range(new):
            run = Run(lease, at, len(tokens) - at, keep=1)
            rows = torch.from_numpy(tokens[at:]).long().to(DEVICE)
            logits, _ = self.target.forward(rows, [run], self.memory.pools)
            at, tokens = len(tokens), np.append(tokens, logits.argmax(-1).int().cpu().numpy())
        self._until(lambda: lease.ready)
        self.cache.commit(lease, tokens[:at])
        self.origin = dict(lease.explanation.tokens)
        found = self._bytes(lease, len(prompt) // PAGE)
        self.cache.release(lease)
        assert self.cache.drain()
        return tokens[len(prompt) :].tolist(), found

    def close(self) -> None:
        self.cache.check()
        self.cache.close()

    def _bytes(self, lease: Lease, pages: int) -> dict[str, bytes]:
        found = {}
        for group, components in self.memory.pools.items():
            slots = lease.slots(group)[:pages]
            there = torch.from_numpy(slots[slots >= 0]).long()
            for name, pools in components.items():
                for layer, pool in enumerate(pools):
                    found[f"{group}.{name}.{layer}"] = _raw(pool.cpu()[there])
        return found

    def _until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not done():
            assert time.monotonic() < end
            self.cache.tick()
            time.sleep(1e-4)


def _raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
