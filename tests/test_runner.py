"""The runner: identical output with and without a draft, and draft state to the byte."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    HIDDEN,
    KINDS,
    PAGE,
    FakeLease,
    allocate,
    draft_tensors,
    save_draft,
    save_target,
    sequence,
)
from torch import Tensor
from torch.nn import functional

from kvkeep.engine.request import RequestState
from kvkeep.engine.runner import Runner, Work
from kvkeep.models.drafts.interface import Draft
from kvkeep.models.drafts.loading import load_draft
from kvkeep.models.target.hf import load_target
from kvkeep.models.target.model import Target

torch.set_num_threads(1)
NEW, SLOTS = 24, 512
DEMO = resources.files("kvkeep.demo")


class Oracle:
    """A draft whose network runs, but whose proposals are scripted."""

    def __init__(self, draft: Draft, script: Callable[[int], int]) -> None:
        self._draft, self._script = draft, script  # position (without ``seq``: step) -> token
        self._step = 0
        self.seq: RequestState | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def fuse(self, features: Tensor) -> Tensor:
        self._step = 0  # every step ends with a rebuild, so the next chain starts anew
        return self._draft.fuse(features)

    def propose(self, hidden: Tensor) -> Tensor:
        at = self._step + (self.seq.length if self.seq else 0)
        self._step += 1
        return torch.full((len(hidden),), self._script(at))


def reader(draft: Draft, text: list[int], wrong: set[int]) -> Oracle:
    """An oracle that knows the text, except at some positions."""
    return Oracle(draft, lambda at: (text[at] + (at in wrong)) % 128)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Draft, Path]:
    root = tmp_path_factory.mktemp("models")
    target = load_target(save_target(root / "target", "Llama"))
    return target, load_draft(save_draft(root / "draft"), target), root


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(3, 128, length).tolist()


class Bench:
    """A runner with its own pools, and leases with slots in random order."""

    def __init__(self, target: Target, draft: Any = None, steps: int = 4, seed: int = 0) -> None:
        groups = [*target.groups(PAGE), *(draft.groups(PAGE) if draft else ())]
        self.pools = {g.name: allocate(g, SLOTS) for g in groups}
        self._free = {
            g.name: np.random.default_rng([seed, i]).permutation(SLOTS).astype(np.int32)
            for i, g in enumerate(groups)
        }
        self.draft = draft
        self.runner = Runner(target, draft, self.pools, PAGE, steps)

    def sequence(self, tokens: list[int], pages: int = 9, **options: Any) -> RequestState:
        tables = {name: free[:pages] for name, free in self._free.items()}
        working = {name: free[pages : pages + 1] for name, free in self._free.items()}
        self._free = {name: free[pages + 1 :] for name, free in self._free.items()}
        return sequence(tokens, FakeLease(tables, working), **options)

    def run(self, seqs: Sequence[RequestState], chunk: int, new: int = NEW) -> list[list[int]]:
        """Serve to ``new`` tokens each; returns the new tokens."""
        while live := [s for s in seqs if s.length - s.prompt_length < new]:
            work = []
            for seq in live:
                left = new - (seq.length - seq.prompt_length)
                work.append(Work(seq, min(chunk, seq.length - seq.computed), left))
            self.runner.step(work)
        return [s.tokens[s.prompt_length :].tolist() for s in seqs]

    def state(self, seq: RequestState, draft_rows: int | None = None) -> dict[str, Tensor]:
        """The sequence's state in position order: rows ``[0, computed)``, and each page's carry.

        Other than the target's, draft rows reach up to ``draft_rows``.
        """
        found = {}
        for group, components in self.pools.items():
            table = torch.from_numpy(seq.lease.slots(group))  # type: ignore[union-attr]
            for name, pools in components.items():
                for layer, pool in enumerate(pools):
                    pages = pool[table]
                    if name == "carry":
                        rows = pages[: -(-seq.computed // PAGE)]
                    else:
                        end = seq.computed if group == "full" else draft_rows or seq.computed
                        rows = pages.flatten(0, 1)[:end]
                    found[f"{group}.{name}.{layer}"] = rows.clone()
        return found

    def load(self, seq: RequestState, other: Bench, source: RequestState, pages: int) -> None:
        """Make the first ``pages`` pages of ``source`` a hit of ``seq``."""
        for group, components in self.pools.items():
            mine, theirs = (one.lease.slots(group)[:pages] for one in (seq, source))  # type: ignore[union-attr]
            for name, pools in components.items():
                for layer, pool in enumerate(pools):
                    pool[mine] = other.pools[group][name][layer][theirs]
        seq.computed = pages * PAGE


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states are the same to the byte."""
    assert a.keys() == b.keys()
    return all(a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)


class Plain:
    """EAGLE-3 without pages, batches or chains of our own: an independent second opinion."""

    def __init__(self, target_directory: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(target_directory)
        self.w = draft_tensors()

    @torch.no_grad()
    def fused(self, tokens: Sequence[int]) -> Tensor:
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer + 1][0] for layer in (0, 1, 2)], -1) @ self.w["fc.weight"].T

    @torch.no_grad()
    def rows(self, tokens: Sequence[int], source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and outputs of the rows of tokens [1, n), given sources [0, n - 1)."""

        def norm(x: Tensor, name: str) -> Tensor:
            return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.w[f"{name}.weight"]

        def heads(name: str, x: Tensor) -> Tensor:
            return (x @ self.w[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 16))

        def rotate(x: Tensor) -> Tensor:
            angle = torch.arange(len(x))[:, None] * 1e4 ** (-torch.arange(0, 16, 2) / 16)
            turn = torch.polar(torch.ones_like(angle), angle)[:, None]
            turned = torch.complex(x[..., :8].contiguous(), x[..., 8:].contiguous()) * turn
            return torch.cat((turned.real, turned.imag), -1)

        embedded = self.model.get_input_embeddings()(torch.tensor(tokens[1:]))
        both = (norm(embedded, "midlayer.input_layernorm"), norm(source, "midlayer.hidden_norm"))
        mixed = torch.cat(both, -1)
        q, k, v = rotate(heads("q", mixed)), rotate(heads("k", mixed)), heads("v", mixed)
        wide = (x.repeat_interleave(2, 1) for x in (k, v))
        seen = functional.scaled_dot_product_attention(
            q.transpose(0, 1), *(x.transpose(0, 1) for x in wide), is_causal=True
        )
        out = (
            source + seen.transpose(0, 1).flatten(1) @ self.w["midlayer.self_attn.o_proj.weight"].T
        )
        gate, up, down = (self.w[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
        x = norm(out, "midlayer.post_attention_layernorm")
        return k, v, out + (functional.silu(x @ gate) * (x @ up)) @ down

    def propose(self, tokens: Sequence[int], steps: int) -> list[int]:
        """The chain after ``tokens``, the last of which the target has not run yet."""
        tokens, source = list(tokens), self.fused(tokens[:-1])
        found: list[int] = []
        for _ in range(steps):
            out = self.rows(tokens, source)[2][-1]
            normed = out * (out.pow(2).mean() + 1e-5).rsqrt() * self.w["norm.weight"]
            best = int((self.w["lm_head.weight"] @ normed).argmax())
            found.append(best + int(self.w["d2t"][best]))
            tokens.append(found[-1])
            source = torch.cat((source, out[None]))
        return found


def generate(directory: Path, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    """What transformers' own ``generate`` continues each prompt with."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0)
    model.generation_config = config
    outs = [
        model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p))) for p in prompts
    ]
    return [out[0, len(p) :].tolist() for out, p in zip(outs, prompts, strict=True)]


LENGTHS = (1, 5, 16, 17, 40, 64, 100, 33)


@pytest.mark.parametrize(("kind", "chunks"), [("llama", (1, 17, 512)), ("qwen3-next", (17,))])
def test_greedy_output_equals_generate(kind: str, chunks: Sequence[int], tmp_path: Path) -> None:
    """test_families has every kind with every chunk."""
    family, options = KINDS[kind]
    directory = save_target(tmp_path / "target", family, **options)
    target = load_target(directory)
    draft = load_draft(save_draft(tmp_path / "draft"), target)
    prompts = [prompt(n) for n in LENGTHS]
    expected = generate(directory, prompts)
    assert len({token for one in expected for token in one}) > 24  # outputs vary
    for chunk in chunks:
        for with_draft in (None, draft):
            bench = Bench(target, with_draft, seed=chunk)
            alone = bench.sequence(prompts[4])
            assert bench.run([alone], chunk) == [expected[4]]
            bench = Bench(target, with_draft, seed=chunk + 1)
            seqs = [bench.sequence(p) for p in prompts]
            assert bench.run(seqs, chunk) == expected
            assert all((s.rounds > 0) == (with_draft is not None) for s in seqs)


def test_multi_token_accepts_and_rejections(models: tuple[Target, Draft, Path]) -> None:
    target, draft, root = models
    text = prompt(21)
    start = len(text)
    text = text + generate(root / "target", [text], 60)[0]
    wrong = {start + i for i in (3, 9, 10, 11, 30, 47, 48)}
    oracle = reader(draft, text, wrong)
    bench = Bench(target, oracle, steps=4)
    seq = oracle.seq = bench.sequence(text[:start], report_proposals=True)
    assert bench.run([seq], chunk=512, new=50) == [text[start : start + 50]]
    at, rounds = start + 1, 0  # by hand: the prefill's token, then rounds up to the first error
    while steps := min(4, start + 50 - at - 1):
        at += next((i for i in range(steps) if at + i in wrong), steps) + 1
        rounds += 1
    assert seq.rounds == rounds < 20
    assert seq.emitted_in_rounds == at - (start + 1) >= 48
    assert len(seq.proposals) == rounds


def test_draft_state_and_proposals_equal_a_plain_recomputation(
    models: tuple[Target, Draft, Path],
) -> None:
    target, draft, root = models
    plain = Plain(root / "target")
    tokens = prompt(37)
    text = tokens + generate(root / "target", [tokens], 60)[0]
    oracle = reader(draft, text, {37 + i for i in (2, 9, 10, 23, 24, 31)})
    for drafter in (draft, oracle):
        bench = Bench(target, drafter)
        seq = oracle.seq = bench.sequence(tokens, report_proposals=True)
        bench.run([seq], chunk=17, new=40)
        source = plain.fused(seq.tokens[: seq.computed].tolist())
        keys, values, out = plain.rows(seq.tokens[: seq.computed + 1].tolist(), source)
        state = bench.state(seq, seq.computed + 1)
        torch.testing.assert_close(state["draft.k.0"][1:], keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state["draft.v.0"][1:], values, atol=1e-5, rtol=1e-5)
        assert not state["draft.k.0"][0].any()  # no row: zero, not left over
        assert not state["draft.v.0"][0].any()
        last = [*range(PAGE - 1, seq.computed, PAGE)]
        last += [seq.computed - 1] * (seq.computed % PAGE > 0)
        torch.testing.assert_close(state["draft.carry.0"], source[last], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(seq.hidden, out[-1], atol=1e-4, rtol=1e-4)
        at = 38
        for chain in seq.proposals:
            if drafter is not oracle:
                assert chain == plain.propose(text[:at], len(chain))
            at += next((i for i, t in enumerate(chain) if t != text[at + i]), len(chain)) + 1


def test_slots_do_not_matter(models: tuple[Target, Draft, Path]) -> None:
    target, draft, _ = models
    states, proposals = [], []
    for seed in (1, 2):
        bench = Bench(target, draft, seed=seed)
        seqs = [bench.sequence(prompt(n), report_proposals=True) for n in (40, 7, 65)]
        bench.run(seqs, chunk=17)
        states.append([bench.state(seq, seq.computed + 1) for seq in seqs])
        proposals.append([seq.proposals for seq in seqs])
    assert all(equal(a, b) for a, b in zip(*states, strict=True))
    assert proposals[0] == proposals[1]


def test_a_hit_gives_the_bytes_and_proposals_of_the_cold_run(
    models: tuple[Target, Draft, Path],
) -> None:
    target, draft, _ = models
    tokens = prompt(100)
    cold = Bench(target, draft)
    first = cold.sequence(tokens, report_proposals=True)
    cold.run([first], chunk=32)
    warm = Bench(target, draft, seed=5)
    second = warm.sequence(tokens, report_proposals=True)
    warm.load(second, cold, first, pages=4)
    warm.run([second], chunk=32)
    assert second.proposals == first.proposals
    assert equal(warm.state(second, second.computed + 1), cold.state(first, first.computed + 1))


def test_a_hit_after_which_another_request_went_on_differently(
    models: tuple[Target, Draft, Path],
) -> None:
    target, draft, root = models
    tokens, other = prompt(100), [*prompt(100)[:64], *prompt(30, seed=1)]
    bench = Bench(target, draft)
    first = bench.sequence(other)
    bench.run([first], chunk=512)
    second = bench.sequence(tokens, report_proposals=True)
    bench.load(second, bench, first, pages=4)
    bench.run([second], chunk=512)
    assert second.proposals
    plain = Plain(root / "target")
    source = plain.fused(second.tokens[: second.computed].tolist())
    keys, _, _ = plain.rows(second.tokens[: second.computed + 1].tolist(), source)
    state = bench.state(second, second.computed + 1)
    torch.testing.assert_close(state["draft.k.0"][1:], keys, atol=1e-5, rtol=1e-5)


def test_missing_draft_state_is_never_read(models: tuple[Target, Draft, Path]) -> None:
    target, draft, _ = models
    tokens = prompt(100)
    cold = Bench(target, draft)
    first = cold.sequence(tokens)
    expected = cold.run([first], chunk=32)
    warm = Bench(target, draft, seed=5)
    second = warm.sequence(tokens, report_proposals=True)
    warm.load(second, cold, first, pages=4)
    for pools in warm.pools["draft"].values():  # only the target's state came back
        pools[0].fill_(torch.nan)
    second.lease.slots("draft")[:4] = -1  # type: ignore[union-attr]
    second.draft_from = 65
    assert warm.run([second], chunk=32) == expected
    assert second.rounds > 0
    assert second.hidden.isfinite().all()
    state, full = warm.state(second), cold.state(first)
    assert not state["draft.k.0"][64].any()
    end = min(second.computed, first.computed)
    torch.testing.assert_close(state["draft.k.0"][65:end], full["draft.k.0"][65:end])


def test_sampled_output_is_the_same_however_it_is_computed(
    models: tuple[Target, Draft, Path],
) -> None:
    target, draft, _ = models
    prompts = [prompt(n) for n in (9, 30, 50)]
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40}
    outputs = []
    for with_draft, chunk in ((None, 512), (draft, 512), (draft, 17)):
        bench = Bench(target, with_draft)
        seqs = [bench.sequence(p, seed=7, **options) for p in prompts]
        outputs.append(bench.run(seqs, chunk))
    assert outputs[0] == outputs[1] == outputs[2]
    preempted = bench.sequence(prompts[0], seed=7, **options)
    bench.run([preempted], 512, new=9)
    preempted.computed, preempted.hidden = 0, None
    assert bench.run([preempted], 17) == outputs[0][:1]
    assert preempted.rounds > 0


def test_speculation_keeps_the_distribution(models: tuple[Target, Draft, Path]) -> None:
    """Chi-square over all outcomes of three tokens, with a draft that is often right."""
    target, draft, root = models
    tokens, k, count = prompt(9), 3, 1536
    model = Plain(root / "target").model
    chance: dict[tuple[int, ...], float] = {(): 1.0}
    with torch.no_grad():
        for _ in range(3):
            grown = {}
            for path, p in chance.items():
                top = model(torch.tensor([[*tokens, *path]])).logits[0, -1].div(5).topk(k)
                for token, q in zip(top.indices.tolist(), top.values.softmax(-1), strict=True):
                    grown[(*path, token)] = p * float(q)
            chance = grown
    favourites = [Counter(path[i] for path in chance).most_common(1)[0][0] for i in (1, 2)]
    oracle = Oracle(draft, lambda step: favourites[step])
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for batch in range(count // 128):
        bench = Bench(target, oracle, steps=2)
        seqs = [
            bench.sequence(tokens, pages=1, seed=128 * batch + i, temperature=5.0, top_k=k)
            for i in range(128)
        ]
        seen.update(tuple(out[:3]) for out in bench.run(seqs, 512, new=3))
        accepted += sum(seq.emitted_in_rounds - seq.rounds for seq in seqs)
    assert set(seen) <= set(chance)
    assert accepted > count / 10
    statistic = sum((seen[path] - count * p) ** 2 / (count * p) for path, p in chance.items())
    assert statistic < 60  # 26 degrees of freedom: exceeded once in 6000 draws


def test_requests_may_decline_speculation(models: tuple[Target, Draft, Path]) -> None:
    target, draft, _ = models
    bench = Bench(target, draft)
    plain, drafted = (bench.sequence(prompt(20), speculate=flag) for flag in (False, True))
    outputs = bench.run([plain, drafted], 512)
    assert outputs[0] == outputs[1]
    assert plain.rounds == 0 < drafted.rounds
    assert plain.hidden.shape == (HIDDEN,)
    a, b = (bench.state(seq) for seq in (plain, drafted))
    torch.testing.assert_close(a["draft.k.0"], b["draft.k.0"], atol=1e-5, rtol=1e-5)


def test_a_step_makes_no_more_tokens_than_asked_for(
    models: tuple[Target, Draft, Path],
) -> None:
    target, draft, _ = models
    bench = Bench(target, draft)
    seq = bench.sequence(prompt(20))
    assert bench.runner.step([Work(seq, 19)])[0].tokens == []
    assert len(bench.runner.step([Work(seq, 1)])[0].tokens) == 1
    assert bench.runner.step([Work(seq, 1, max_new=1)])[0].proposals is None
    chain = bench.runner.step([Work(seq, 1, max_new=3)])[0].proposals
    assert chain is not None
    assert len(chain) == 2


@pytest.mark.parametrize("name", ["period-64", "period-200"])
def test_the_demo_pair_accepts_long_chains(name: str) -> None:
    target = load_target(Path(str(DEMO / "pair" / "target")))
    draft = load_draft(Path(str(DEMO / "pair" / "draft")), target)
    tokens = json.loads((DEMO / "prompts.json").read_text())[name][0]
    outputs = []
    for drafter in (None, draft):
        bench = Bench(target, drafter, steps=7)
        seq = bench.sequence(tokens, pages=75)
        outputs.append(bench.run([seq], chunk=512, new=100))
    assert outputs[0] == outputs[1]
    assert seq.emitted_in_rounds / seq.rounds >= 6
