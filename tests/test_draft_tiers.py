"""Every kind of draft in a whole engine: its state goes down to storage and comes back."""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_kinds import KINDS
from test_runner import generate, prompt
from tiny_models import PAGE, VOCAB, save_target

from kvkeep.engine.config import EngineConfig
from kvkeep.engine.core import Engine
from kvkeep.engine.messages import Ask, Evict, Figures, Finished, Generate, Output, Sampling, Usage
from kvkeep.settings import make

torch.set_num_threads(1)
NEW = 24
HIT = 96  # of a prompt of 100 tokens, in pages of 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models

    directory = save_target(tmp_path_factory.mktemp("models") / "target", "Llama")
    words = {f"w{i}": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    return directory


PROMPT = prompt(100)
BRANCH = [*PROMPT[:64], *prompt(36, seed=1)]


@pytest.fixture(scope="module")
def expected(target: Path) -> list[list[int]]:
    return generate(target, [PROMPT, BRANCH], NEW)


class Served:
    """An engine, and the answers to one message at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = Engine(config)
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.engine.listen(self._replies.put)
        self.engine.start()

    def continued(self, tokens: list[int]) -> tuple[list[int], Usage]:
        sampling = Sampling(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        self.engine.send(Generate(id="r", tokens=tokens, sampling=sampling, report_proposals=True))
        found: list[int] = []
        while isinstance(reply := self._replies.get(timeout=60), Output):
            found += reply.tokens
        assert isinstance(reply, Finished)
        return found, reply.usage

    def empty(self, *tiers: str) -> None:
        """Evict tiers, once nothing on its way down keeps them."""
        pending = True
        while pending:
            self.engine.send(Ask("a"))
            figures = self._replies.get(timeout=60)
            assert isinstance(figures, Figures)
            pending = figures.values["transfers_pending"] > 0
            time.sleep(0.005)
        for tier in tiers:
            self.engine.send(Evict("e", tier))
            self._replies.get(timeout=60)


@contextmanager
def served(target: Path, storage: Path, **options: Any) -> Iterator[Served]:
    values = {
        "model": target, "page_size": PAGE, "device_tokens": 1024, "context_length": 256,
        "storage_dir": storage, "storage_bytes": 1 << 26, "prefetch_min_tokens": 0,
        "recompute": "never",
    }  # fmt: skip
    one = Served(make(EngineConfig, values | options))
    yield one
    one.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_proposes_the_same_from_every_tier(
    kind: str, target: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    draft = KINDS[kind].save(tmp_path / "draft")
    with served(target, tmp_path / "storage", draft=draft) as one:
        found, cold = one.continued(PROMPT)
        assert found == expected[0]
        assert sum(cold.cached_tokens.values()) == 0 < cold.verify_steps
        for tier, gone in (("device", ()), ("host", ("device",)), ("storage", ("device", "host"))):
            one.empty(*gone)
            found, usage = one.continued(PROMPT)
            assert found == expected[0]
            assert usage.cached_tokens[tier] == HIT
            assert usage.proposals == cold.proposals
        assert one.continued(BRANCH)[0] == expected[1]


@pytest.fixture(scope="module")
def without_draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine without a draft stores."""
    storage = tmp_path_factory.mktemp("without") / "storage"
    with served(target, storage) as one:
        one.continued(PROMPT)
        one.empty()
    return storage


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_that_was_stored_without_the_draft(
    kind: str, target: Path, without_draft: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    shutil.copytree(without_draft, tmp_path / "storage")
    draft = KINDS[kind].save(tmp_path / "draft")
    for missing, hit in (("lenient", HIT), ("strict", 0)):
        with served(target, tmp_path / "storage", draft=draft, missing=missing) as one:
            found, usage = one.continued(PROMPT)
        assert found == expected[0]
        assert sum(usage.cached_tokens.values()) == hit
        assert usage.verify_steps > 0
