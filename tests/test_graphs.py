"""Decoding by recordings gives what decoding without gives.

On a CPU, what is recorded is the function itself: it runs again on the same buffers, as a CUDA
graph would. Whether CUDA's own recordings do, tests of the marker ``gpu`` tell.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import interpreted  # noqa: F401
import pytest
import torch
from draft_kinds import save_eagle1, save_eagle3, save_mtp
from test_attention import SCALE, Options, plain
from test_runner import Bench, prompt
from tiny_models import KINDS, save_target
from torch import Tensor

from kvkeep.models.attention import kernels
from kvkeep.models.attention.blocks import Blocks
from kvkeep.models.attention.interface import Scoring
from kvkeep.models.attention.paged import PagedAttention
from kvkeep.models.drafts.loading import load_draft
from kvkeep.models.graphs import Graphs, NotRecordable, Tensors
from kvkeep.models.target import model as target_module
from kvkeep.models.target.hf import load_target
from kvkeep.models.target.model import Target

NEW = 10
PROMPTS = [prompt(9), prompt(21, 1), prompt(14, 2)]  # batches of 3 are filled to 4


@pytest.fixture(autouse=True)
def block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models attend by block tables. The kernel's place is taken by plain attention, as Triton's
    interpreter is slow."""

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, scoring: Scoring, _: int
    ) -> Tensor:
        options, out = Options(blocks.window, scoring.softcap, scoring.sinks), []
        starts, firsts = blocks.positions.tolist(), blocks.firsts.tolist()
        for i, (begin, end) in enumerate(pairwise(blocks.begins.tolist())):
            seen = [x[blocks.tables[i]].flatten(0, 1) for x in (keys, values)]
            rows = query[begin:end] * (scoring.scale / SCALE)
            out.append(plain(rows, *seen, starts[begin], firsts[i], options))
        return torch.cat(out).to(query.dtype)

    monkeypatch.setattr(kernels, "attend", attend)
    monkeypatch.setattr(target_module, "attention_on", PagedAttention)


class Again:
    """Records by keeping the function."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        self.recorded += 1

        def replay() -> Tensors:
            self.replayed += 1
            return function()

        return replay


def load(directory: Path, kind: str = "llama") -> Target:
    family, overrides = KINDS[kind]
    return load_target(save_target(directory / kind, family, **overrides))


def serve(model: Target, draft: Path | None = None) -> tuple[list[list[int]], list[Tensor]]:
    """New tokens of all prompts, served together to different lengths, and what pools hold."""
    bench = Bench(model, load_draft(draft, model) if draft else None)
    seqs = [bench.sequence(tokens) for tokens in PROMPTS]
    bench.run(seqs, chunk=8, new=NEW)
    bench.run(seqs[:2], chunk=8, new=NEW + 3)
    bench.run(seqs[1:2], chunk=8, new=NEW + 5)
    held = [row for seq in seqs for row in bench.state(seq).values()]
    return [seq.tokens.tolist() for seq in seqs], held


def same(found: tuple[list[list[int]], list[Tensor]], expected: object) -> None:
    tokens, held = expected  # type: ignore[misc]
    assert found[0] == tokens
    torch.testing.assert_close(found[1], held, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt-oss", "qwen3-moe"])
def test_steps_of_one_row(tmp_path: Path, kind: str) -> None:
    model, record = load(tmp_path, kind), Again()
    expected = serve(model)
    model.graphs = Graphs(record)
    same(serve(model), expected)
    assert record.recorded == 3  # of 4, 2 and 1 sequences
    assert record.replayed > NEW


@pytest.mark.parametrize(
    "save",
    [save_eagle3, save_eagle1, partial(save_mtp, layers=2, chain_hidden_states=True), None],
    ids=["eagle3", "eagle1", "mtp", "standalone"],
)
def test_steps_of_drafts_and_of_verifying(
    tmp_path: Path, save: Callable[[Path], Path] | None
) -> None:
    model, record = load(tmp_path), Again()
    draft = save(tmp_path / "draft") if save else tmp_path / "llama"
    expected = serve(model, draft)
    model.graphs = Graphs(record)
    same(serve(model, draft), expected)
    assert record.replayed > NEW


@pytest.mark.parametrize("kind", ["deepseek-v2", "lfm2"])
def test_what_is_gathered_or_moves_is_not_recorded(tmp_path: Path, kind: str) -> None:
    model, record = load(tmp_path, kind), Again()
    model.graphs = Graphs(record)
    serve(model)
    assert record.recorded == 0


def test_what_cannot_be_recorded_is_run_as_it_is() -> None:
    tried = []

    def refuse(function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        tried.append(function)
        raise NotRecordable("it waits")

    graphs = Graphs(refuse)
    for i in range(3):
        (found,) = graphs.run("double", lambda x: (2 * x[0],), (torch.tensor([i, 1]),))
        assert found.tolist() == [2 * i, 2]
    assert len(tried) == 1


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x * x.sum().item(),
        lambda x: x * int(x[0] > 1),
        lambda x: x.to("meta"),
    ],
    ids=["mask", "nonzero", "item", "if", "another device"],
)
def test_what_makes_the_host_wait_is_not_recorded(waiting: Callable[[Tensor], Tensor]) -> None:
    record, x = Again(), torch.tensor([1.0, 2.0])
    graphs = Graphs(record)
    (found,) = graphs.run("waits", lambda inputs: (waiting(inputs[0]),), (x,))
    assert found.shape == waiting(x).shape
    (found,) = graphs.run("looks up", lambda inputs: (inputs[0][torch.tensor([1, 0])],), (x,))
    assert found.tolist() == [2.0, 1.0]
    assert record.recorded == 1


def test_what_a_recording_returns_is_not_overwritten() -> None:
    graphs = Graphs(Again())
    found = [
        graphs.run("same", lambda x: (x[0], x[1]), (torch.tensor([i]), torch.ones(1, 2)))
        for i in range(3)
    ]
    assert [one[0].item() for one in found] == [0, 1, 2]
