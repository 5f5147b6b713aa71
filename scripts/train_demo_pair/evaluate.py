"""Measures an exported pair: accept lengths with correct, stale and masked draft KV, and copying.

    python -m scripts.train_demo_pair.evaluate src/kvkeep/demo/pair

Decoding is greedy with chains of seven drafted tokens, so eight tokens are verified per round.
Every prompt runs as if its first 960 of 1,024 tokens were a prefix hit:

    cold    all draft rows are correct, as if nothing had been cached
    stale   the draft rows and the carried feature of the hit are another prompt's
    masked  the draft attends only to rows after the hit, from token 961 on

The target's KV is correct in all three, so its output must be the same in all three.
"""

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LlamaForCausalLM

from .data import PROMPT_TOKENS, build_corpus, tiled_prompt
from .export import FIXED_PROMPTS, load_draft, load_target
from .model import Draft, features
from .train_draft import DRAFT_STEPS

NEW_TOKENS = 200
PAGE_TOKENS = 64
HIT = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
PROMPTS = 8
CONDITIONS = ("cold", "stale", "masked")
COLD_AT_LEAST = 7.0
STALE_AT_MOST = {64: 3.5, 200: 2.0}  # by period
SMALLEST_GAP = 0.1  # between the two best logits, so that rounding does not change outputs
_SLOTS = PROMPT_TOKENS + NEW_TOKENS + 2 * (DRAFT_STEPS + 1)


class TargetRun:
    """The target and its KV cache for one sequence."""

    def __init__(self, target: LlamaForCausalLM, draft: Draft) -> None:
        """Start with an empty cache."""
        self._target = target
        self._fuse = draft.fc
        self._cache = DynamicCache(config=target.config)

    def feed(self, tokens: list[int], start: int) -> tuple[list[int], Tensor]:
        """Run `tokens` at positions from `start` on, after dropping the cache from there.

        Returns the greedy successor of each token, and the fused features `[1, tokens, hidden]`.
        """
        surplus = self._cache.get_seq_length() - start
        if surplus > 0:
            self._cache.crop(-surplus)
        seen = self._target(
            torch.tensor([tokens]), past_key_values=self._cache, output_hidden_states=True
        )
        return seen.logits[0].argmax(-1).tolist(), self._fuse(features(seen.hidden_states))


class DraftRun:
    """The draft and its KV rows. Row i is computed from token i and the feature of token i - 1."""

    def __init__(self, draft: Draft, embed: torch.nn.Module) -> None:
        """Start with no rows. Slot 0 stays empty."""
        config = draft.config
        shape = (1, config.num_key_value_heads, _SLOTS, config.head_dim)
        self._draft = draft
        self._embed = embed
        self._keys = torch.zeros(shape)
        self._values = torch.zeros(shape)
        self.valid_from = 1  # attention masks rows in earlier slots

    def feed(self, tokens: list[int], hidden: Tensor, slot: int) -> Tensor:
        """Write rows from `slot` on and return the last one's output, `[1, 1, hidden]`.

        `hidden[0, i]` is the feature of the token before `tokens[i]`, or a draft's stand-in.
        """
        end = slot + len(tokens)
        rows = torch.arange(slot, end)
        query, key, value = self._draft.project(
            self._embed(torch.tensor([tokens])), hidden, rows.unsqueeze(0) - 1
        )
        self._keys[:, :, slot:end] = key
        self._values[:, :, slot:end] = value
        slots = torch.arange(end)
        seen = (slots <= rows[:, None]) & (slots >= self.valid_from)
        attended = functional.scaled_dot_product_attention(
            query,
            self._keys[:, :, :end],
            self._values[:, :, :end],
            # A row before `valid_from` attends only to itself; its output is not used.
            attn_mask=seen | (slots == rows[:, None]),
            enable_gqa=True,
        )
        return self._draft.finish(attended, hidden)[:, -1:]

    def propose(self, hidden: Tensor, slot: int) -> list[int]:
        """Draft a chain that starts in `slot`. Accepted tokens overwrite its rows later."""
        chain: list[int] = []
        while True:
            chain.append(int(self._draft.logits(hidden).argmax()))
            if len(chain) == DRAFT_STEPS:
                return chain
            hidden = self.feed(chain[-1:], hidden, slot)
            slot += 1


@dataclass(frozen=True, slots=True)
class Generation:
    """Output of one request."""

    tokens: list[int]  # NEW_TOKENS of them
    accept_length: float  # mean over rounds of accepted tokens, bonus token included


@torch.inference_mode()
def generate(
    target: LlamaForCausalLM, draft: Draft, prompt: list[int], condition: str, decoy: list[int]
) -> Generation:
    """Decode greedily after a prefix hit of HIT tokens, under one of CONDITIONS."""
    embed = target.model.embed_tokens
    run, rows = TargetRun(target, draft), DraftRun(draft, embed)
    _, cached = run.feed(prompt[:HIT], 0)
    remembered = prompt[:HIT]
    if condition == "stale":
        remembered = decoy[:HIT]
        _, cached = TargetRun(target, draft).feed(remembered, 0)
    rows.feed(remembered[1:], cached[:, :-1], slot=1)
    carry = cached[:, -1:]
    if condition == "masked":
        rows.valid_from = HIT + 1  # the row of token 960 needs the carried feature too

    length = len(prompt)
    successors, fused = run.feed(prompt[HIT:], HIT)
    output = successors[-1:]
    hidden = torch.cat([carry, fused], dim=1)
    last = rows.feed([*prompt[HIT:], *output], hidden, slot=HIT)
    accepted = []
    while len(output) < NEW_TOKENS:
        # The target's cache has `length` tokens; the draft already has the row after them.
        chain = rows.propose(last, slot=length + 1)
        successors, fused = run.feed([output[-1], *chain], length)
        agreed = 0
        while agreed < DRAFT_STEPS and chain[agreed] == successors[agreed]:
            agreed += 1
        accepted.append(agreed + 1)
        gained = successors[: agreed + 1]
        output += gained
        last = rows.feed(gained, fused[:, : agreed + 1], slot=length + 1)
        length += agreed + 1
    return Generation(output[:NEW_TOKENS], statistics.fmean(accepted))


@torch.inference_mode()
def smallest_gap(target: LlamaForCausalLM, prompt: list[int], output: list[int]) -> float:
    """Return the smallest difference between the two best logits over all tokens of `output`."""
    logits = target(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    best = logits[len(prompt) - 1 :].topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def _held_out_rows(rows: int) -> Tensor:
    """Return rows of held-out text, int64 `[rows, PROMPT_TOKENS]`."""
    tokens = torch.from_numpy(build_corpus().held_out)
    return tokens[: rows * PROMPT_TOKENS].view(rows, PROMPT_TOKENS)


@torch.inference_mode()
def text_loss(target: LlamaForCausalLM, rows: Tensor) -> float:
    """Return the target's mean loss on `rows`, in nats per token."""
    logits = target(rows, use_cache=False).logits[:, :-1]
    return float(functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of all prompts of one period."""

    accept_lengths: dict[str, list[float]]  # by condition
    gaps: list[float]  # per prompt, the smallest over its new tokens
    copied: bool  # every output continues its prompt's period
    lossless: bool  # every output is the same under all conditions

    def within_limits(self, stale_at_most: float) -> bool:
        """Whether all limits hold, over all prompts and over the demo's fixed prompts alone."""
        return (
            self.copied
            and self.lossless
            and min(self.gaps) > SMALLEST_GAP
            and all(
                statistics.fmean(self.accept_lengths["cold"][:count]) >= COLD_AT_LEAST
                and statistics.fmean(self.accept_lengths["stale"][:count]) <= stale_at_most
                for count in (FIXED_PROMPTS, PROMPTS)
            )
        )


def measure(target: LlamaForCausalLM, draft: Draft, period: int) -> Measured:
    """Run every prompt of one period under every condition."""
    lengths: dict[str, list[float]] = {condition: [] for condition in CONDITIONS}
    gaps, copied, lossless = [], True, True
    for index in range(PROMPTS):
        prompt = tiled_prompt(index, period)
        decoy = tiled_prompt(index, PROMPT_TOKENS)
        made = {name: generate(target, draft, prompt, name, decoy) for name in CONDITIONS}
        for name, generation in made.items():
            lengths[name].append(generation.accept_length)
        output = made["cold"].tokens
        whole = prompt + output
        copied &= whole[period:] == whole[:-period]
        lossless &= all(generation.tokens == output for generation in made.values())
        gaps.append(smallest_gap(target, prompt, output))
    return Measured(lengths, gaps, copied, lossless)


def _row(values: list[float]) -> str:
    means = f"{statistics.fmean(values):5.2f} {statistics.fmean(values[:FIXED_PROMPTS]):9.2f}  "
    return means + "".join(f"{value:6.2f}" for value in values)


def main() -> None:
    """Print a table of all conditions and periods; exit with an error if a limit is missed."""
    parser = argparse.ArgumentParser(description="Measure an exported demo pair.")
    parser.add_argument("pair", type=Path, help="directory with target/ and draft/")
    parser.add_argument("--text", action="store_true", help="also measure held-out text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    target, draft = load_target(options.pair / "target"), load_draft(options.pair / "draft")

    met = True
    print(f"accept length over {NEW_TOKENS} new tokens, hit {HIT} of {PROMPT_TOKENS} tokens")
    print(f"period  condition   mean  first {FIXED_PROMPTS}   each of {PROMPTS} prompts")
    for period, stale_at_most in STALE_AT_MOST.items():
        measured = measure(target, draft, period)
        for name, lengths in measured.accept_lengths.items():
            print(f"{period:6}  {name:9} {_row(lengths)}")
        print(f"        smallest top-2 gap:    {_row(measured.gaps)}")
        print(
            f"        copying exact: {measured.copied}, lossless: {measured.lossless}", flush=True
        )
        met &= measured.within_limits(stale_at_most)
    if options.text:
        rows = _held_out_rows(PROMPTS)
        lengths = [generate(target, draft, row, "cold", row).accept_length for row in rows.tolist()]
        print(f"held-out text: cold {_row(lengths)}; {text_loss(target, rows):.2f} nats per token")
    print("all limits met" if met else "LIMITS MISSED")
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()
