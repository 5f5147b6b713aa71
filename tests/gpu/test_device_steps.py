"""On a device: steps of targets and drafts with CUDA graphs, compared with the same without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from draft_kinds import save_eagle1, save_eagle3
from served import DEVICE, GPU, load
from tiny_models import HIDDEN, PAGE, FakeLease, allocate
from torch import Tensor

from kvkeep.models.drafts.loading import load_draft
from kvkeep.models.graphs import Graphs
from kvkeep.models.passes import Pools, Run
from kvkeep.schema import Group

pytestmark = GPU
SEQUENCES, PAGES = 5, 4  # graphs pad the batch to 8 sequences


def pools_of(groups: tuple[Group, ...]) -> dict[str, Pools]:
    """Pools with random contents, so that results depend on which slots a row reads."""
    torch.manual_seed(0)
    made: dict[str, Pools] = {}
    for group in groups:
        made[group.name] = {
            name: [torch.randn_like(pool).to(DEVICE) for pool in pools]
            for name, pools in allocate(group, SEQUENCES * PAGES, 0.0).items()
        }
    return made


def leases(groups: tuple[Group, ...]) -> list[FakeLease]:
    slots = np.random.default_rng(0).permutation(SEQUENCES * PAGES).astype(np.int32)
    tables = slots.reshape(SEQUENCES, PAGES)
    return [FakeLease({group.name: table for group in groups}) for table in tables]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_steps_of_a_target(tmp_path: Path, rows: int, dtype: str) -> None:
    target = load(tmp_path / "llama", "llama", dtype)
    groups = target.groups(PAGE)
    found = []
    for graphs in (None, Graphs()):
        target.graphs, pools = graphs, pools_of(groups)
        for start in (3, 20, 41):
            runs = [Run(lease, start + i, rows, rows) for i, lease in enumerate(leases(groups))]
            tokens = torch.arange(SEQUENCES * rows, device=DEVICE) + start
            found.append(target.forward(tokens, runs, pools)[0])
    assert target.graphs is not None
    assert target.graphs.recorded == 1
    for plain, replayed in zip(found[:3], found[3:], strict=True):
        close(replayed, plain, dtype)


@pytest.mark.parametrize("save", [save_eagle3, save_eagle1], ids=["eagle3", "eagle1"])
@torch.inference_mode()
def test_steps_of_a_draft(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    target = load(tmp_path / "llama")
    draft = load_draft(save(tmp_path / "draft"), target)
    groups = draft.groups(PAGE)
    source = torch.randn(SEQUENCES, HIDDEN, device=DEVICE)
    found = []
    for graphs in (None, Graphs()):
        target.graphs, pools = graphs, pools_of(groups)
        for start in (3, 20, 41):
            runs = [Run(lease, start + i, 1, first=i) for i, lease in enumerate(leases(groups))]
            tokens = torch.arange(SEQUENCES, device=DEVICE) + start
            found.append(draft.forward(0, tokens, source, runs, pools))
    assert target.graphs is not None
    assert target.graphs.recorded == 1
    for plain, replayed in zip(found[:3], found[3:], strict=True):
        close(replayed, plain, "float32")


def close(found: Tensor, expected: Tensor, dtype: str) -> None:
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    assert (found - expected).norm() < tolerance * expected.norm()
