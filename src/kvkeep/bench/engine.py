"""Time to first token of hits in storage: beside computing, beside a hit without the draft's
state, and with storage so slow that computing is faster.

The demo pair in float32. Each prompt is computed once and goes to storage; then the memory tiers
are emptied, and it comes back, from the page cache of the operating system. The sides take turns,
and rows have the medians.

The draft's extra time is of what brings state back: from a request's arrival until all of it is on
the device (``Usage.wait_ms``: question, read, load, and whatever lies between). With a draft that
may take longer by the draft's share of the bytes, which is its row's peer: bytes of the draft's
state per byte of the target's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from ..demo.run import DRAFT, TARGET
from ..engine.build import open_store
from ..engine.config import EngineConfig
from ..engine.core import Engine
from ..engine.messages import Finished, Generate, Reply, Sampling, Usage
from ..schema import InvariantError, Schema
from ..stores.base import Store
from ..testing.wrappers import ThrottledStore
from .measure import Row, Tell, row

LENGTHS = (1024, 2048, 4096)  # tokens that are hit; one more is computed
STORED, SLOWLY = "from storage", "from storage of 1 MB/s"
RETURNS = 5  # times that a prompt comes back
FAST, SLOW = 1e12, 1e6  # bytes per second of storage; the first is no limit


class Side:
    """An engine with a storage of its own, which serves one request at a time."""

    def __init__(self, directory: Path, draft: Path | None, recompute: str) -> None:
        config = EngineConfig(
            model=TARGET,
            draft=draft,
            storage_dir=directory,
            device_tokens=2 * max(LENGTHS),
            recompute=recompute,
        )
        self._engine = Engine(config, self._open)
        self._replies: list[Reply] = []
        self._engine.listen(self._replies.append)

    def _open(self, config: EngineConfig, schema: Schema) -> Store:
        store = open_store(config, schema)
        assert store is not None  # the config has a directory
        self._store = ThrottledStore(store, FAST)
        return self._store

    def first_token(self, tokens: Sequence[int], bytes_per_second: float = FAST) -> Usage:
        """What it took; all state of it is in storage alone when this returns."""
        self._store.bytes_per_second = bytes_per_second
        sampling = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._engine.send(Generate(id="", tokens=list(tokens), sampling=sampling))
        while not (self._replies and isinstance(self._replies[-1], Finished)):
            self._engine.turn()
        usage = self._replies[-1].usage
        self._replies.clear()
        self._store.bytes_per_second = FAST
        self._engine.cache.drain()
        for tier in ("device", "host"):
            self._engine.cache.evict(tier)
        return usage

    def close(self) -> None:
        self._engine.close()


class Times:
    """Of one side's prompts of one length, in milliseconds unless said otherwise."""

    def __init__(self) -> None:
        self.cold: list[float] = []  # to the first token, computed
        self.stored: list[float] = []  # to the first token, from storage
        self.back: list[float] = []  # until all state was back from storage
        self.size = 0  # bytes of that

    def restored(self, usage: Usage) -> None:
        if usage.cached_tokens["storage"] != usage.prompt_tokens - 1:
            raise InvariantError(f"not all came back from storage: {usage.cached_tokens}")
        self.stored.append(usage.ttft_ms)
        self.back.append(usage.wait_ms)
        self.size = usage.loaded_bytes


def measure(repeats: int, tell: Tell, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Rows of each length; ``tokens`` says which.

    Args:
        repeats: prompts of each length and side.
    """
    rows = []
    with _side(None) as plain, _side(DRAFT) as drafting, _side(DRAFT, "auto") as throttled:
        for side in (plain, drafting, throttled):  # what happens once only, happens before
            side.first_token(_prompt(lengths[0], 0))
            side.first_token(_prompt(lengths[0], 0), SLOW if side is throttled else FAST)
        for length in lengths:
            sides = [(plain, Times()), (drafting, Times())]
            slow, cold = [], []
            for turn in range(1, repeats + 1):
                tell(f"{length} tokens from storage, turn {turn} of {repeats}")
                prompt = _prompt(length, turn)
                for side, times in sides:
                    times.cold.append(side.first_token(prompt).ttft_ms)
                for side, times in sides * RETURNS:
                    times.restored(side.first_token(prompt))
                cold.append(throttled.first_token(prompt).ttft_ms)
                slow.append(throttled.first_token(prompt, SLOW).ttft_ms)
            found = _rows(length, *(times for _, times in sides))
            found.append(
                row(f"{length} tokens {SLOWLY}", median(slow), "ms", "computed", median(cold))
            )
            for one in found:
                one["tokens"] = length
            rows += found
    return rows


def _rows(length: int, without: Times, having: Times) -> list[Row]:
    label = f"{length} tokens"
    extra = median(having.back) / median(without.back) - 1
    share = having.size / without.size - 1
    return [
        row(f"{label} {STORED}{more}", median(one.stored), "ms", "computed", median(one.cold))
        for one, more in ((having, ""), (without, ", no draft"))
    ] + [row(f"{label} back, extra for the draft", extra, "", "its bytes", share)]


@contextmanager
def _side(draft: Path | None, recompute: str = "never") -> Iterator[Side]:
    with TemporaryDirectory() as directory:
        side = Side(Path(directory), draft, recompute)
        try:
            yield side
        finally:
            side.close()


def _prompt(length: int, turn: int) -> list[int]:
    """Random tokens, and one that is computed."""
    found: list[int] = np.random.default_rng([length, turn]).integers(3, 2048, length + 1).tolist()
    return found
