"""Storage faults: no wrong token, no interruption of service, and every fault is counted."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rig import Pair, Rig, prompt
from tiny_models import save_draft, save_target

from kvkeep.engine.build import OpenStore, open_store
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.core import Engine
from kvkeep.schema import ConfigError, DraftMismatch, Schema, UnsupportedModel
from kvkeep.server.metrics import Metrics
from kvkeep.stores.base import Store
from kvkeep.testing.wrappers import Faults, FaultyStore, WrapperStore

PROMPTS = [[*prompt(64, i % 2), *prompt(60 + 5 * i, i)] for i in range(8)]
NEW = 12


@pytest.fixture(scope="module")
def expected(tiny: Pair) -> list[list[int]]:
    with Rig(tiny, draft=False) as rig:
        return [answer.tokens for answer in rig.run(*[rig.send(p, NEW) for p in PROMPTS])]


@pytest.fixture(scope="module")
def filled(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage directory with all prompts. Tests must copy it before use."""
    directory = tmp_path_factory.mktemp("filled") / "store"
    with Rig(tiny, storage_dir=directory) as rig:
        rig.run(*[rig.send(p, NEW) for p in PROMPTS])
        rig.check_idle()
    return directory


def serve(rig: Rig) -> list[list[int]]:
    """Outputs of all prompts, sent in two batches; evicts both memory tiers after each."""
    found = []
    for wave in (PROMPTS[:4], PROMPTS[4:]):
        found += [answer.tokens for answer in rig.run(*[rig.send(p, NEW) for p in wave])]
        rig.evict("device", "host")
    rig.check_idle()
    return found


def hits(rig: Rig) -> float:
    return sum(answer.cached["storage"] for answer in rig.answers.values())


# -- damaged files


def scribble(file: Path) -> None:
    """Corrupt one byte in every block of 4 KiB."""
    dice, raw = random.Random(0), bytearray(file.read_bytes())
    for start in range(0, len(raw), 4096):
        raw[start + dice.randrange(min(4096, len(raw) - start))] ^= 1 + dice.randrange(255)
    file.write_bytes(raw)


def halve(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (scribble, "slabs"),
        (scribble, "all"),
        (halve, "slabs"),
        (halve, "index"),
        (empty, "index"),
        (empty, "all"),
        (Path.unlink, "slabs"),
        (Path.unlink, "index"),
    ],
)
def test_damaged_files(
    damage: Callable[[Path], None], what: str, tiny: Pair, filled: Path, tmp_path: Path,
    expected: list[list[int]],
) -> None:  # fmt: skip
    directory = tmp_path / "store"
    shutil.copytree(filled, directory)
    files = [file for file in directory.rglob("*") if file.is_file()]
    slabs = [file for file in files if file.stat().st_size > 200_000]
    assert len(slabs) == 2  # one per group
    for file in files:
        if what == "all" or (file in slabs) == (what == "slabs"):
            damage(file)
    with Rig(tiny, storage_dir=directory) as rig:
        assert serve(rig) == expected
        if what == "slabs" and damage is scribble:
            assert rig.figure("storage_faults_total") > 0
            assert rig.figure("missed_reads_total") > 0
    with Rig(tiny, storage_dir=directory) as rig:  # records written since then are good
        assert serve(rig) == expected
        assert hits(rig) > 0


def test_files_damaged_while_it_runs(
    tiny: Pair, filled: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    directory = tmp_path / "store"
    shutil.copytree(filled, directory)
    slabs = [f for f in directory.rglob("*") if f.is_file() and f.stat().st_size > 200_000]
    with Rig(tiny, storage_dir=directory) as rig:
        for tokens, output in zip(PROMPTS, expected, strict=True):
            assert rig.ask(tokens, NEW).tokens == output
            rig.evict("device", "host")
            for slab in slabs:
                raw = bytearray(slab.read_bytes())
                at = random.Random(len(tokens)).randrange(len(raw) // 2)
                with slab.open("r+b") as file:
                    file.seek(at)
                    file.write(os.urandom(40_000))
        assert hits(rig) > 0
        assert rig.figure("storage_faults_total") > 0
        rig.check_idle()


# -- a backend that misbehaves


def faulty(plan: Faults, made: list[FaultyStore]) -> OpenStore:
    def make(config: EngineConfig, schema: Schema) -> Store:
        store = open_store(config, schema)
        assert store is not None
        made.append(FaultyStore(store, plan))
        return made[-1]

    return make


@pytest.mark.parametrize(
    ("plan", "counted"),
    [
        (Faults(fail=0.3), "transfer_faults_total"),
        (Faults(corrupt=0.3), "missed_reads_total"),
        (Faults(corrupt=1.0), "storage_faults_total"),
        (Faults(lose=0.3), None),
        (Faults(delay=0.02), None),
        (Faults(fail=0.1, corrupt=0.1, lose=0.1, delay=0.005), "transfer_faults_total"),
    ],
    ids=str,
)
def test_a_backend_that_misbehaves(
    plan: Faults, counted: str | None, tiny: Pair, filled: Path, tmp_path: Path,
    expected: list[list[int]],
) -> None:  # fmt: skip
    directory = tmp_path / "store"
    shutil.copytree(filled, directory)
    with Rig(tiny, storage_dir=directory, store=faulty(plan, [])) as rig:
        assert serve(rig) == expected
        if counted:
            assert rig.figure(counted) > 0
            page = Metrics().render(rig.engine.figures()).decode()
            lines = [line for line in page.splitlines() if line.startswith(f"kvkeep_{counted}")]
            assert sum(float(line.split()[-1]) for line in lines) > 0


def test_a_backend_that_hangs(
    tiny: Pair, filled: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """Requests continue without it, including the one that was waiting for it."""
    directory = tmp_path / "store"
    shutil.copytree(filled, directory)
    made: list[FaultyStore] = []
    with Rig(tiny, storage_dir=directory, store=faulty(Faults(), made)) as rig:
        rig.engine.cache.transfers._stall = 0.2
        made[0].stall()
        try:
            answers = rig.run(*[rig.send(p, NEW) for p in PROMPTS])
            assert [answer.tokens for answer in answers] == expected
            assert rig.figure("storage_breaker_open") == 1
            assert rig.figure("transfer_faults_total") > 0
        finally:
            made[0].resume()
        rig.check_idle()
        rig.engine.cache.transfers.storage.breaker.success()  # close it now instead of in a second
        rig.evict("device", "host")
        assert serve(rig) == expected
        assert hits(rig) > 0


@pytest.mark.slow
def test_a_backend_that_hangs_for_good_does_not_block_close(tiny: Pair, tmp_path: Path) -> None:
    made: list[FaultyStore] = []
    with Rig(tiny, storage_dir=tmp_path / "store", store=faulty(Faults(), made)) as rig:
        rig.engine.cache.transfers._stall = 0.2
        made[0].stall()
        rig.ask(PROMPTS[0], NEW)
        rig.engine.cache.close(timeout=0.1)
        made[0].resume()
    made[0].close()


class ReadOnly(WrapperStore):
    """Rejects writes."""

    def write(self, *_: Any) -> list[bool]:
        raise PermissionError(13, "Permission denied")


def test_a_backend_that_cannot_be_written(
    tiny: Pair, filled: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    directory = tmp_path / "store"
    shutil.copytree(filled, directory)

    def make(config: EngineConfig, schema: Schema) -> Store:
        store = open_store(config, schema)
        assert store is not None
        return ReadOnly(store)

    with Rig(tiny, storage_dir=directory, store=make) as rig:
        fresh = prompt(100, 9)
        first = rig.ask(fresh, NEW).tokens
        rig.evict("device", "host")
        assert rig.ask(fresh, NEW).tokens == first
        assert rig.figure("transfer_faults_total") > 0
        assert rig.figure("unwritten_pages_total") > 0
        rig.check_idle()
        rig.engine.cache.transfers.storage.breaker.success()
        assert serve(rig) == expected
        assert hits(rig) > 0


# -- configurations that cannot be served


def test_what_does_not_fit(tiny: Pair, tmp_path: Path) -> None:
    def engine(model: Path = tiny.target, draft: Path | None = None, **options: Any) -> None:
        Engine(EngineConfig(model=model, draft=draft, **options))

    with pytest.raises(ConfigError, match="not a model directory"):
        engine(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="not a model directory"):
        engine(draft=tmp_path / "nothing")
    with pytest.raises(UnsupportedModel, match="MedusaModel"):
        engine(draft=save_draft(tmp_path / "medusa", architectures=["MedusaModel"]))
    with pytest.raises(DraftMismatch):
        engine(draft=save_draft(tmp_path / "draft", hidden_size=32))
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="'dynamic'"):
        engine(save_target(tmp_path / "rope", "Llama", rope_parameters=rope))
    with pytest.raises(UnsupportedModel, match="jamba"):
        engine(save_target(tmp_path / "jamba", "Jamba", mamba_dt_rank=4))
    with pytest.raises(ConfigError, match="context"):
        engine(context_length=100_000)
    with pytest.raises(ConfigError, match="does not hold"):
        engine(device_tokens=64, context_length=128)
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match="cannot keep a cache"):
        engine(storage_dir=tmp_path / "file")


def test_the_command_line_says_what_does_not_fit(tiny: Pair, tmp_path: Path) -> None:
    """What the engine's process finds is the server's one line."""
    model = shutil.copytree(tiny.target, tmp_path / "model")
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    command = [sys.executable, "-m", "kvkeep", "serve", str(model), "--port", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith(f"kvkeep: {weights} is damaged: ")
    assert "Traceback" not in ran.stderr


def test_another_models_storage_is_a_miss(tiny: Pair, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    with Rig(tiny, storage_dir=directory) as rig:
        rig.ask(PROMPTS[0], NEW)
    other = Pair(save_target(tmp_path / "other", "Qwen2"), tiny.draft)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.target / name, other.target)
    with Rig(other, storage_dir=directory) as rig:
        first = rig.ask(PROMPTS[0], NEW)
        assert not any(first.cached.values())
        rig.evict("device", "host")
        assert rig.ask(PROMPTS[0], NEW).tokens == first.tokens
    with Rig(tiny, storage_dir=directory, page_size=32) as rig:  # so is another page size's
        assert rig.ask(PROMPTS[0], NEW).cached["storage"] == 0
    with Rig(tiny, storage_dir=directory, draft=False) as rig:  # the draft is a separate group
        assert rig.ask(PROMPTS[0], NEW).cached["storage"] == 112
