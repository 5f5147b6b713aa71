"""Every kind of draft: rows, carry and proposals against a plain recomputation, and to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_kinds import KINDS, Kind, Reference
from test_runner import Bench, equal, generate, prompt
from tiny_models import PAGE, save_target
from torch import Tensor

from kvkeep.engine.request import RequestState
from kvkeep.models.drafts.interface import Draft
from kvkeep.models.drafts.loading import load_draft
from kvkeep.models.target.hf import load_target
from kvkeep.models.target.model import Target

torch.set_num_threads(1)
LENGTHS = (1, 37, 18)
NEW, STEPS = 24, 5


@dataclass
class Case:
    """A kind of draft at its target, and what to expect of it."""

    kind: Kind
    target: Target
    draft: Draft
    reference: Reference
    prompts: list[list[int]]
    texts: list[list[int]]  # each prompt and what the target makes of it


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("models") / "target", "Llama")


@pytest.fixture(scope="module")
def target(target_directory: Path) -> Target:
    return load_target(target_directory)


@pytest.fixture(scope="module")
def texts(target_directory: Path) -> list[list[int]]:
    prompts = [prompt(n) for n in LENGTHS]
    new = generate(target_directory, prompts, NEW + 8)
    return [a + b for a, b in zip(prompts, new, strict=True)]


@pytest.fixture(scope="module")
def plain_target(target_directory: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(target_directory)


@pytest.fixture(scope="module", params=KINDS)
def case(
    request: pytest.FixtureRequest,
    target: Target,
    plain_target: Any,
    texts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    kind = KINDS[request.param]
    directory = kind.save(tmp_path_factory.mktemp("models") / "draft")
    reference = Reference(kind, plain_target, directory)
    prompts = [text[:n] for text, n in zip(texts, LENGTHS, strict=True)]
    return Case(kind, target, load_draft(directory, target), reference, prompts, texts)


class Reader:
    """A draft whose network runs, but which proposes a text that it knows, except where it errs."""

    def __init__(self, draft: Draft, text: list[int], wrong: set[int]) -> None:
        self._draft, self._text, self._wrong = draft, text, wrong
        self.seq: RequestState | None = None
        self._at = (0, 0)  # length, and the position that the next proposal is for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def propose(self, hidden: Tensor) -> Tensor:
        assert self.seq is not None
        length, at = self._at
        at = at + 1 if length == self.seq.length else self.seq.length
        self._at = self.seq.length, at
        return torch.full((len(hidden),), (self._text[at] + (at in self._wrong)) % 128)


def near(found: Tensor, expected: Tensor) -> bool:
    """Whether they differ by rounding alone."""
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1))


def check_state(case: Case, bench: Bench, seq: RequestState, gap: int = 0, since: int = 0) -> None:
    """Rows from slot ``since`` on, carry and what proposes next, against the reference."""
    kind, computed = case.kind, seq.computed
    text = tuple(seq.tokens[: computed + 1].tolist())
    stages = case.reference.rows(text, gap)
    state = bench.state(seq, computed + 1)
    for k, rows in enumerate(stages):
        for i, (keys, values) in enumerate(zip(rows.keys, rows.values, strict=True)):
            for name, expected in (("k", keys), ("v", values)):
                found = state[f"{kind.group}.{name}.{k * kind.layers + i}"]
                first = max(rows.first, since)
                assert near(found[first:], expected[first - rows.first :])
                assert not found[max(gap, since) : rows.first].any()  # no row: zero, not left over
        if kind.fed[k] == "nothing":
            continue
        for page in range(max(gap, since) // PAGE, -(-computed // PAGE)):
            end = min((page + 1) * PAGE, computed)
            if kind.fed[k] == "previous":
                expected = stages[k - 1].output(end - 1)
            else:
                of = end - kind.shift(k)
                expected = case.reference.features(text[:-1])[max(of, 0)] * (of >= gap)
            assert near(state[f"{kind.group}.carry.{k}"][page], expected)
    expected = torch.cat([rows.output(computed) for rows in stages])
    assert near(seq.hidden, expected)


def check_proposals(case: Case, seq: RequestState, gap: int = 0) -> None:
    text, at = seq.tokens.tolist(), seq.prompt_length + 1
    for chain in seq.proposals:
        assert chain == case.reference.propose(tuple(text[:at]), len(chain), gap)
        at += next((i for i, t in enumerate(chain) if t != text[at + i]), len(chain)) + 1


@pytest.mark.parametrize("chunk", [1, 17, 512])
def test_rows_carry_and_proposals_are_those_of_a_plain_recomputation(
    case: Case, chunk: int
) -> None:
    bench = Bench(case.target, case.draft, STEPS, seed=chunk)
    seqs = [bench.sequence(tokens, report_proposals=True) for tokens in case.prompts]
    for seq, out, text in zip(seqs, bench.run(seqs, chunk, NEW), case.texts, strict=True):
        assert out == text[seq.prompt_length : seq.prompt_length + NEW]
        check_state(case, bench, seq)
        check_proposals(case, seq)


def test_rows_and_carry_after_accepts_and_rejections(case: Case) -> None:
    """The prompt in one chunk: the test above compares what other chunks leave."""
    text, start = case.texts[1], len(case.prompts[1])
    reader = Reader(case.draft, text, {start + i for i in (2, 9, 10, 17)})
    bench = Bench(case.target, reader, STEPS)
    seq = reader.seq = bench.sequence(case.prompts[1])
    assert bench.run([seq], 512, NEW) == [text[start : start + NEW]]
    assert seq.rounds < 10  # most proposals were right, and not all
    check_state(case, bench, seq)


def test_a_hit_gives_the_bytes_and_proposals_of_the_cold_run(case: Case) -> None:
    tokens, pages = prompt(100), 4
    cold = Bench(case.target, case.draft, STEPS)
    first = cold.sequence(tokens, report_proposals=True)
    cold.run([first], 32, NEW)
    warm = Bench(case.target, case.draft, STEPS, seed=5)
    second = warm.sequence(tokens, report_proposals=True)
    load(case, warm, second, cold, first, pages)
    warm.run([second], 32, NEW)
    assert second.proposals == first.proposals
    assert torch.equal(second.hidden, first.hidden)
    (group,) = case.draft.groups(PAGE)
    since = group.needed(pages).start
    states = []
    for bench, seq in ((cold, first), (warm, second)):
        state = bench.state(seq, seq.computed + 1)
        states.append(
            {
                name: one
                if name.startswith("full")
                else one[since * (1 if "carry" in name else PAGE) :]
                for name, one in state.items()
            }
        )
    assert equal(*states)


def load(
    case: Case, bench: Bench, seq: RequestState, other: Bench, source: RequestState, n: int
) -> None:
    """A hit of ``n`` pages, of which a window's are there only as far as it reaches."""
    bench.load(seq, other, source, n)
    (group,) = case.draft.groups(PAGE)
    assert seq.lease is not None
    gone = seq.lease.slots(group.name)[: group.needed(n).start]
    for pools in bench.pools[group.name].values():
        for pool in pools:
            pool[gone] = torch.nan
    gone[:] = -1


def test_a_hit_after_which_another_request_went_on_differently(case: Case) -> None:
    tokens, other = prompt(100), [*prompt(100)[:64], *prompt(30, seed=1)]
    bench = Bench(case.target, case.draft, STEPS)
    first = bench.sequence(other)
    bench.run([first], 512, NEW)
    second = bench.sequence(tokens, report_proposals=True)
    load(case, bench, second, bench, first, 4)
    bench.run([second], 17, NEW)
    (group,) = case.draft.groups(PAGE)
    check_state(case, bench, second, since=group.needed(4).start * PAGE)
    check_proposals(case, second)


def test_missing_rows_are_never_read(case: Case) -> None:
    tokens, gap = prompt(100), 64
    cold = Bench(case.target, case.draft, STEPS)
    first = cold.sequence(tokens)
    expected = cold.run([first], 512, NEW)
    warm = Bench(case.target, case.draft, STEPS, seed=5)
    second = warm.sequence(tokens, report_proposals=True)
    warm.load(second, cold, first, gap // PAGE)
    for pools in warm.pools[case.kind.group].values():  # only the target's state came back
        for pool in pools:
            pool.fill_(torch.nan)
    assert second.lease is not None
    second.lease.slots(case.kind.group)[: gap // PAGE] = -1
    second.draft_from = gap + 1
    assert warm.run([second], 17, NEW) == expected
    check_state(case, warm, second, gap, since=gap)
    check_proposals(case, second, gap)


def test_groups(case: Case) -> None:
    kind, stages = case.kind, len(case.kind.fed)
    (group,) = case.draft.groups(PAGE)
    assert (group.name, group.sharded, group.required) == (kind.group, False, False)
    assert group.tail == (None if kind.window is None else -(-(kind.window - 1) // PAGE))
    layers = {c.name: c.layers for c in group.components}
    assert layers["k"] == layers["v"] == tuple(range(stages * kind.layers))
    assert layers.get("carry", ()) == tuple(range(sum(fed != "nothing" for fed in kind.fed)))
    assert len(group.source) == 32
