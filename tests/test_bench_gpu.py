"""The benchmarks of a CUDA device, as far as a CPU can tell: what is compared, and what is told."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tiny_models import SHAPE

from kvkeep.bench import device_model, gpu
from kvkeep.bench.measure import Row, row

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def llama() -> device_model.Llama:
    torch.manual_seed(0)
    return device_model.Llama("cpu", **SHAPE, initializer_range=0.3)


def test_a_part_that_fails_is_a_row_and_those_before_are_written(
    tmp_path: Path,
) -> None:
    file = tmp_path / "gpu.json"

    def one() -> list[Row]:
        return [row("decode", 2.0, "tokens/s", "theirs", 4.0)]

    def breaks() -> list[Row]:
        assert [row["name"] for row in json.loads(file.read_text())["rows"]] == ["decode"]
        raise RuntimeError("[cuda] no such kernel")

    parts = [gpu.Part("one", ">= 3", one), gpu.Part("two", ">= 0.8", breaks)]
    rows = gpu.run([*parts, gpu.Part("three", "<= 1", one)], file)
    found = json.loads(file.read_text())
    assert found["rows"] == rows
    assert [row.get("ratio") for row in rows] == [0.5, None, 0.5]
    assert rows[1] == {
        "name": "two", "goal": ">= 0.8", "failed": "RuntimeError: [cuda] no such kernel"
    }  # fmt: skip
    assert {"torch", "commit"} <= found["machine"].keys()
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(gpu.as_table(rows))
    output = console.export_text()
    assert output.count("[cuda]") == 1
    assert output.count("tokens/s") == 2
    assert output.count("0.50") == 2


def test_parts_are_found_without_a_model() -> None:
    names = [part.name for part in gpu.parts(print)]
    assert len(set(names)) == len(names)
    assert [name for name in names if "decoding" in name] == [
        f"decoding beside {peer}" for peer in device_model.PEERS
    ]


@pytest.mark.parametrize(("recordings", "told"), [(1, ", recorded"), (0, ", NOT recorded")])
def test_a_refused_recording_is_told(
    llama: device_model.Llama, recordings: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_model, "Graphs", lambda: SimpleNamespace(recorded=recordings))
    monkeypatch.setattr(device_model, "PROMPT", 40)
    monkeypatch.setattr(llama.theirs, "get_compiled_call", lambda _: llama.theirs)
    for peer in device_model.PEERS:
        one = device_model.decode(llama, peer)
        assert one["name"] == f"forward and argmax, batch 1, 40 tokens{told}"
        assert one["peer"] == peer
        assert one["ours"] > 0


def test_the_same_loop_makes_the_tokens_of_generate(
    llama: device_model.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32: in bfloat16 two tokens may be equally likely, and the two sum in other orders."""
    monkeypatch.setattr(llama, "theirs", copy.deepcopy(llama.theirs).float())
    monkeypatch.setattr(llama.theirs, "get_compiled_call", lambda _: llama.theirs)
    prompt = torch.randint(llama.target.vocab_size, (1, 40))
    step = device_model.transformers_loop(llama, prompt, 12)
    found = [step() for _ in range(12)]
    expected = llama.theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, min_new_tokens=12,
        do_sample=False, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    assert len(set(found)) > 6
    assert found == expected[0, 40:].tolist()


def test_it_runs_where_there_are_no_packages_of_a_server() -> None:
    absent = "dict.fromkeys(('fastapi', 'msgspec', 'prometheus_client', 'typer', 'uvicorn'))"
    script = f"import sys; sys.modules.update({absent}); import kvkeep.bench.gpu"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("failing", ["pytest", "kvkeep.bench.gpu", "nothing"])
def test_make_gpu_runs_both_and_fails_where_one_does(tmp_path: Path, failing: str) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/log\n[ "$2" != {failing} ]\n')
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        ["make", "-C", ROOT, "gpu", f"GPU_PYTHON={python}"], env=environment, capture_output=True
    )
    assert (done.returncode == 0) == (failing == "nothing")
    log = (tmp_path / "log").read_text()
    assert "-m pytest -m gpu" in log
    assert "-m kvkeep.bench.gpu" in log
