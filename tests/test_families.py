"""Every kind of state, by one set of tests: what transformers computes, served from pages.

Leases are as poor as they may be. Pages that slid out of a window lose their slot, their bytes and
everything that was never written are NaN, and snapshots have slots at cuts only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import KINDS, VOCAB, FakeLease, allocate, save_target, sequence
from torch import Tensor

from kvkeep.engine.request import RequestState
from kvkeep.engine.runner import Runner, Work
from kvkeep.models.checkpoint import KV_DTYPES
from kvkeep.models.drafts.interface import Source, Stage
from kvkeep.models.passes import Pools, Run
from kvkeep.models.target.hf import load_target
from kvkeep.models.target.model import Target
from kvkeep.schema import Component, Group, Identity, Schema

torch.set_num_threads(1)
PAGE, PAGES, SLOTS, NEW, STEPS = 8, 12, 160, 24, 4
LENGTHS = (40, 1, 5, 16, 17, 33, 64, 24)
CHUNKS = (1, 17, 512)
CUTS = [16, 40, 48, 56, 72]
BATCHES = ((1, False), (8, True), (8, False), (1, True))  # sequences, with a draft


class Script:
    """A draft that knows the text: it tells sequences apart by their first slot."""

    aux_layers = (0,)
    stages = (Stage(1, Source.TARGET),)

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}  # by first slot

    def groups(self, page_tokens: int) -> tuple[Group, ...]:
        rows, width = (page_tokens, 1), (2,)
        shapes = {"k": rows, "v": rows, "carry": width}
        parts = tuple(Component(n, (0,), shape, "F32") for n, shape in shapes.items())
        return (Group("draft", parts, required=False),)

    def fuse(self, features: Tensor) -> Tensor:
        return features[:, :2]

    def forward(
        self,
        stage: int,
        tokens: Tensor,
        source: Tensor | None,
        runs: Sequence[Run],
        pools: Mapping[str, Pools],
    ) -> Tensor:
        """``[rows, 2]``: whose row it is, and its position."""
        whose = [int(run.tables.slots("draft")[0]) for run in runs]
        rows = [
            (w, run.start + i) for w, run in zip(whose, runs, strict=True) for i in range(run.rows)
        ]
        return torch.tensor(rows)

    def propose(self, hidden: Tensor) -> Tensor:
        """The text's next token, but now and then another one."""
        tokens = []
        for slot, at in hidden.tolist():
            text = self.texts[slot]
            right = text[at + 1] if at + 1 < len(text) else 0
            tokens.append((right + (at % 7 == 3)) % VOCAB)
        return torch.tensor(tokens)


class Bench:
    """A runner, its pools, and leases whose slots lie in random order."""

    def __init__(self, target: Target, draft: Script | None = None, seed: int = 0) -> None:
        self.groups = [*target.groups(PAGE), *(draft.groups(PAGE) if draft else ())]
        self.pools = {group.name: allocate(group, SLOTS) for group in self.groups}
        self._random, self._draft = np.random.default_rng(seed), draft
        self._free = {g.name: self._random.permutation(SLOTS).astype(np.int32) for g in self.groups}
        self.runner = Runner(target, draft, self.pools, PAGE, STEPS)

    def lease(self) -> FakeLease:
        lease = FakeLease({}, {}, CUTS)
        for group in self.groups:
            free = self._free[group.name]
            lease.tables[group.name] = free[:PAGES].copy()
            if group.working:
                lease.workers[group.name] = free[PAGES : PAGES + group.working].copy()
                ends = (np.arange(PAGES) + 1) * PAGE
                lease.tables[group.name][~np.isin(ends, CUTS)] = -1
            self._free[group.name] = free[PAGES + group.working :]
        return lease

    def sequence(self, tokens: Sequence[int], text: Sequence[int] = ()) -> RequestState:
        lease = self.lease()
        if self._draft:
            self._draft.texts[int(lease.slots("draft")[0])] = list(text)
        return sequence(list(tokens), lease)

    def run(self, seqs: Sequence[RequestState], chunk: int, new: int = NEW) -> list[list[int]]:
        """Serve to ``new`` tokens each, chunks ending at cuts; returns whole texts."""
        while live := [s for s in seqs if s.generated < new]:
            work = []
            for seq in live:
                cut = next((c for c in CUTS if c > seq.computed), 10**6)
                size = min(chunk, seq.length - seq.computed, cut - seq.computed)
                work.append(Work(seq, size, new - seq.generated))
            self.runner.step(work)
            for seq in live:
                self.slide(seq)
        return [s.tokens.tolist() for s in seqs]

    def slide(self, seq: RequestState) -> None:
        """What a window's commit does, and worse: the bytes are gone at once."""
        assert isinstance(seq.lease, FakeLease)
        for group in self.groups:
            if group.tail is not None and not group.working:
                table = seq.lease.tables[group.name]
                behind = slice(0, group.needed(seq.computed // PAGE).start)
                for pool in (x for pools in self.pools[group.name].values() for x in pools):
                    pool[table[behind][table[behind] >= 0]] = torch.nan
                table[behind] = -1

    def final(self, seq: RequestState) -> dict[str, Tensor]:
        """State in position order: of groups that need every page, and the running ones."""
        assert seq.lease is not None
        found = {}
        for group in self.groups:
            for name, pools in self.pools[group.name].items():
                if group.working:
                    rows = [pool[seq.lease.working(group.name)] for pool in pools]
                elif group.tail is None and group.required:
                    table = torch.from_numpy(seq.lease.slots(group.name))
                    rows = [pool[table].flatten(0, 1)[: seq.computed] for pool in pools]
                else:
                    continue
                found[f"{group.name}.{name}"] = torch.stack(rows)
        return found

    def hit(self, seq: RequestState, other: Bench, source: RequestState, pages: int) -> None:
        """Give ``seq`` what a hit of ``pages`` pages of ``source`` brings: copies, elsewhere."""
        assert seq.lease is not None
        assert source.lease is not None
        for group in self.groups:
            needed = slice(group.needed(pages).start, pages)
            mine, theirs = (s.lease.slots(group.name)[needed] for s in (seq, source))
            for name, pools in self.pools[group.name].items():
                for pool, from_pool in zip(pools, other.pools[group.name][name], strict=True):
                    pool[mine] = from_pool[theirs]
        seq.computed = pages * PAGE
        self.slide(seq)


@dataclass
class Family:
    """A model as transformers runs it and as we do, and texts that both agree on."""

    index: int
    directory: Path

    @cached_property
    def model(self) -> Any:
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(
            self.directory, attn_implementation="eager"
        )

    @cached_property
    def target(self) -> Target:
        return load_target(self.directory)

    @cached_property
    def texts(self) -> list[list[int]]:
        """Prompts with their greedy continuations."""
        bench = Bench(self.target)
        prompts = [np.random.default_rng(n).integers(3, 128, n).tolist() for n in LENGTHS]
        return bench.run([bench.sequence(p) for p in prompts], 512)

    @torch.no_grad()
    def logits(self, text: Sequence[int]) -> Tensor:
        """``[len(text), vocab]`` in one pass of transformers."""
        logits: Tensor = self.model(torch.tensor([text]), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module", params=KINDS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    prefix, options = KINDS[request.param]
    directory = save_target(tmp_path_factory.mktemp(request.param), prefix, **options)
    return Family(list(KINDS).index(request.param), directory)


def test_texts_are_greedy_continuations(family: Family) -> None:
    import transformers

    for length, text in zip(LENGTHS, family.texts, strict=True):
        assert family.logits(text)[length - 1 : -1].argmax(-1).tolist() == text[length:]
    assert len({token for text in family.texts for token in text[-NEW:]}) > NEW  # outputs vary
    config = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    family.model.generation_config = config
    prompt = torch.tensor([family.texts[0][: LENGTHS[0]]])
    out = family.model.generate(prompt, attention_mask=torch.ones_like(prompt))
    assert out[0].tolist() == family.texts[0]


def zeros(bench: Bench) -> dict[str, dict[str, list[Tensor]]]:
    """Pools of running states, with nothing run yet."""
    return {g.name: allocate(g, SLOTS, 0) for g in bench.groups if g.working}


@torch.inference_mode()
def logits_of(target: Target, text: list[int], chunk: int) -> Tensor:
    """``[len(text), vocab]``: chunks of the prompt, then single tokens."""
    bench, at, found = Bench(target, seed=chunk), 0, []
    lease, pools = bench.lease(), bench.pools | zeros(bench)
    while at < len(text):
        end = min(at + chunk, LENGTHS[0]) if at < LENGTHS[0] else at + 1
        run = Run(lease, at, end - at, keep=end - at)
        found.append(target.forward(torch.tensor(text[at:end]), [run], pools)[0])
        target.store([0])
        at = end
    return torch.cat(found)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_at_every_position(family: Family, chunk: int) -> None:
    text = family.texts[0]
    found = logits_of(family.target, text, chunk)
    torch.testing.assert_close(found, family.logits(text), atol=1e-4, rtol=0)


@torch.inference_mode()
def test_features_are_layer_outputs(family: Family) -> None:
    texts = [family.texts[0][:33], family.texts[6][:20], family.texts[5][:20]]
    tokens = [torch.tensor(text) for text in texts]
    states = [family.model(x[None], output_hidden_states=True).hidden_states for x in tokens]
    bench = Bench(family.target)
    runs = [Run(bench.lease(), 0, len(text)) for text in texts]
    for layers in ((2, 0), (1, 4), ()):  # 4: after the final norm
        family.target.capture(layers)
        logits, features = family.target.forward(
            torch.cat(tokens), runs, bench.pools | zeros(bench)
        )
        assert logits.shape == (0, VOCAB)
        if not layers:
            assert features is None
            continue
        expected = [
            torch.cat([one[min(layer + 1, len(one) - 1)][0] for layer in layers], -1)
            for one in states  # the last one is normed
        ]
        torch.testing.assert_close(features, torch.cat(expected), atol=1e-4, rtol=1e-4)


def check_tokens(family: Family, chunk: int, batch: int, drafted: bool) -> None:
    bench = Bench(family.target, Script() if drafted else None, seed=chunk)
    pairs = list(zip(LENGTHS, family.texts, strict=True))[:batch]
    seqs = [bench.sequence(text[:length], text) for length, text in pairs]
    assert bench.run(seqs, chunk) == [text for _, text in pairs]
    rounds, emitted = (sum(getattr(s, n) for s in seqs) for n in ("rounds", "emitted_in_rounds"))
    if drafted:
        assert rounds * 2 < emitted < rounds * STEPS  # whole chains are accepted, and broken ones
    else:
        assert rounds == 0


@pytest.mark.parametrize("chunk", CHUNKS)
def test_tokens_do_not_depend_on_chunks_batches_or_drafts(family: Family, chunk: int) -> None:
    """Any two of family, chunk, batch and draft meet."""
    check_tokens(family, chunk, *BATCHES[(family.index + CHUNKS.index(chunk)) % len(BATCHES)])


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "drafted"), BATCHES)
@pytest.mark.parametrize("chunk", [3, *CHUNKS])
def test_tokens_of_every_combination(family: Family, chunk: int, batch: int, drafted: bool) -> None:
    check_tokens(family, chunk, batch, drafted)


@pytest.mark.parametrize(("new", "pages"), [(4, 5), (NEW, 7)], ids=["prefill", "decode"])
def test_a_hit_goes_on_as_if_it_had_never_left(family: Family, new: int, pages: int) -> None:
    """After a snapshot at the end of a prefill chunk, or of tokens accepted several at a time."""
    text, first_cut = family.texts[0], pages * PAGE
    cold = Bench(family.target, Script())
    source = cold.sequence(text[: LENGTHS[0]], text)
    cold.run([source], 17, new)
    reached = [cut // PAGE - 1 for cut in CUTS if cut <= source.computed]
    assert source.snapshots == (reached if "state" in cold.pools else [])
    warm = Bench(family.target, Script(), seed=1)
    seq = warm.sequence(text[: first_cut + 2], text)
    warm.hit(seq, cold, source, pages)
    assert warm.run([seq], 17, len(text) - first_cut - 2) == [text]
    cold.run([source], 17)
    for name, one in warm.final(seq).items():
        torch.testing.assert_close(one, cold.final(source)[name], atol=1e-3, rtol=1e-3)


KV = (("bfloat16", 0.1), ("float16", 0.02), ("fp8_e4m3", 0.7))


@torch.inference_mode()
def test_keys_and_values_in_another_dtype(family: Family) -> None:
    dtype, tolerance = KV[family.index % len(KV)]
    target, text = load_target(family.directory, kv_dtype=dtype), family.texts[0]
    (mine, plain) = (
        Schema(Identity(one.digest), PAGE, one.groups(PAGE)) for one in (target, family.target)
    )
    for group, other in zip(mine.groups, plain.groups, strict=True):
        kept = {c.dtype for c in group.components}
        assert kept == {"F32" if group.name == "state" else KV_DTYPES[dtype]}
        same = mine.fingerprint(group) == plain.fingerprint(other)
        assert same == (group.name == "state")
    logits, expected = logits_of(target, text, 17), family.logits(text)
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-5 < error.median() < tolerance
