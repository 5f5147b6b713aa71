"""Time to first token of hits in storage: beside computing, beside a hit without the draft's
state, and with storage so slow that computing is faster.

The demo pair in float32. Each prompt is computed once and goes to storage; then the memory tiers
are emptied, and it comes back, from the page cache of the operating system. The sides take turns,
and rows have the medians.

The draft's extra time is of what brings state back: what a first token takes longer after a hit in
storage than after one on the device. With a draft that may be more by the draft's share of the
bytes, which is its row's peer: bytes of the draft's state per byte of the target's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from ..core.policy import Policy
from ..demo.run import DRAFT, TARGET
from ..engine.build import open_store
from ..engine.config import EngineConfig
from ..engine.core import Engine
from ..engine.messages import Finished, Generate, Reply, Sampling, Usage
from ..schema import InvariantError, Schema
from ..stores.base import Store
from ..testing.wrappers import ThrottledStore
from .measure import Row, Tell, frozen, row

LENGTHS = (1024, 2048, 4096)  # tokens that are hit; one more is computed
STORED, SLOWLY = "from storage", "from storage of 1 MB/s"
RETURNS = 60  # times that a prompt comes back
FAST, SLOW = math.inf, 1e6  # bytes per second of storage


class Side:
    """An engine with a storage of its own, which serves one request at a time."""

    def __init__(self, directory: Path, draft: Path | None, recompute: str) -> None:
        config = EngineConfig(
            model=TARGET,
            draft=draft,
            storage_dir=directory,
            device_tokens=2 * max(LENGTHS),
            policy=Policy(recompute=recompute),
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
        """What it took."""
        self._store.bytes_per_second = bytes_per_second
        sampling = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)
        self._engine.send(Generate(id="", tokens=list(tokens), sampling=sampling))
        while not (self._replies and isinstance(self._replies[-1], Finished)):
            self._engine.turn()
        usage = self._replies[-1].usage
        self._replies.clear()
        self._store.bytes_per_second = FAST
        return usage

    def empty(self) -> None:
        """Leave everything in storage, and nothing in memory."""
        self._engine.cache.drain()
        for tier in ("device", "host"):
            self._engine.cache.evict(tier)

    def close(self) -> None:
        self._engine.close()


class Times:
    """Of one side's prompts of one length, in milliseconds unless said otherwise."""

    def __init__(self) -> None:
        self.cold: list[float] = []  # to the first token, computed
        self.stored: list[float] = []  # to the first token, after a hit in storage, ...
        self.there: list[float] = []  # ... and on the device
        self.size = 0  # bytes of the state

    def compute(self, side: Side, prompt: Sequence[int]) -> None:
        self.cold.append(side.first_token(prompt).ttft_ms)
        side.empty()

    def restore(self, side: Side, prompt: Sequence[int]) -> None:
        stored, there = side.first_token(prompt), side.first_token(prompt)
        found = stored.cached_tokens["storage"], there.cached_tokens["device"]
        if found != (len(prompt) - 1, len(prompt) - 1):
            raise InvariantError(f"of {len(prompt) - 1} tokens only {found} were hit")
        self.stored.append(stored.ttft_ms)
        self.there.append(there.ttft_ms)
        self.size = stored.loaded_bytes
        side.empty()

    @property
    def back(self) -> float:
        """Milliseconds that bringing the state back takes: each return beside the one after it,
        which lie close together in time."""
        return float(np.median(np.subtract(self.stored, self.there)))


def measure(repeats: int, tell: Tell, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Rows of each length; ``tokens`` says which.

    Args:
        repeats: prompts of each length and side.
    """
    rows = []
    with (
        _side(None) as plain,
        _side(DRAFT) as drafting,
        _side(DRAFT, "auto") as throttled,
        frozen(),
    ):
        for side in (plain, drafting, throttled):  # what happens once only, happens before
            for rate in (FAST, SLOW if side is throttled else FAST):
                side.first_token(_prompt(lengths[0], 0), rate)
                side.empty()
        for length in lengths:
            without, having = Times(), Times()
            cold: list[float] = []
            slow: list[float] = []
            for turn in range(1, repeats + 1):
                tell(f"{length} tokens from storage, turn {turn} of {repeats}")
                prompt = _prompt(length, turn)
                _turn([(plain, without), (drafting, having)], prompt)
                for kept, rate in ((cold, FAST), (slow, SLOW)):
                    kept.append(throttled.first_token(prompt, rate).ttft_ms)
                    throttled.empty()
            rows += _rows(length, without, having, median(slow), median(cold))
    return rows


def _turn(sides: list[tuple[Side, Times]], prompt: Sequence[int]) -> None:
    for side, times in sides:
        times.compute(side, prompt)
    for side, times in sides * RETURNS:
        times.restore(side, prompt)


def _rows(length: int, without: Times, having: Times, slow: float, cold: float) -> list[Row]:
    label = f"{length} tokens"
    extra, share = having.back / without.back - 1, having.size / without.size - 1
    rows = [
        row(f"{label} {STORED}{more}", median(one.stored), "ms", "computed", median(one.cold))
        for one, more in ((having, ""), (without, ", no draft"))
    ]
    rows.append(row(f"{label} back, extra for the draft", extra, "", "its bytes", share))
    rows.append(row(f"{label} {SLOWLY}", slow, "ms", "computed", cold))
    for one in rows:
        one["tokens"] = length
    return rows


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
