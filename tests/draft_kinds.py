"""One tiny draft of each kind, and what each computes, written out without pages or batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import HIDDEN, VOCAB, draft_config, draft_tensors, save_target
from torch import Tensor
from torch.nn import functional

Config = dict[str, Any]


def layer_shapes(prefix: str, inputs: int = HIDDEN, biased: str = "") -> dict[str, tuple[int, ...]]:
    """A decoder layer of 4 heads on 2 key heads, 16 numbers each; without a first norm."""
    rows = {"q": 64, "k": 32, "v": 32}
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{prefix}self_attn.{n}_proj.weight": (size, inputs) for n, size in rows.items()},
        **{f"{prefix}self_attn.{n}_proj.bias": (rows[n],) for n in biased},
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, 64),
        f"{prefix}mlp.gate_proj.weight": (128, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (128, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, 128),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
    }
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.15 + name.endswith("norm.weight")
        for name, shape in shapes.items()
    }


def write_draft(directory: Path, config: Config, tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def save_eagle3(directory: Path, **options: Any) -> Path:
    return write_draft(directory, draft_config(**options), draft_tensors())


def save_eagle1(directory: Path, layers: int = 1, biased: str = "", **options: Any) -> Path:
    name = "Qwen2ForCausalLMEagle" if biased else "LlamaForCausalLMEagle"
    config = draft_config(architectures=[name], num_hidden_layers=layers, **options)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    for i in range(layers):
        shapes |= layer_shapes(f"layers.{i}.", HIDDEN, biased)
        if i:
            shapes[f"layers.{i}.input_layernorm.weight"] = (HIDDEN,)
    if layers == 1:
        shapes |= {"fc.bias": (HIDDEN,), "embed_tokens.weight": (VOCAB, HIDDEN)}
    return write_draft(directory, config, random_tensors(shapes))


def save_mtp(directory: Path, layers: int, **options: Any) -> Path:
    """As in a checkpoint that holds the target, too."""
    config = draft_config(
        architectures=["MiMoForCausalLM"], num_nextn_predict_layers=layers, **options
    )
    shapes: dict[str, tuple[int, ...]] = {"model.layers.0.mlp.up_proj.weight": (4, 4)}
    for i in range(layers):
        at = f"model.mtp_layers.{i}."
        shapes |= layer_shapes(at, HIDDEN, "qkv")
        shapes[f"{at}input_proj.weight"] = (HIDDEN, 2 * HIDDEN)
        for name in ("token", "hidden", "input", "final"):
            shapes[f"{at}{name}_layernorm.weight"] = (HIDDEN,)
    return write_draft(directory, config, random_tensors(shapes))


def save_standalone(directory: Path) -> Path:
    return save_target(directory, "Qwen3", num_hidden_layers=2, hidden_size=48, head_dim=16)


@dataclass(frozen=True)
class Kind:
    """A kind of draft, as its paper has it."""

    save: Callable[[Path], Path]
    fed: tuple[str, ...]  # by stage: "target", "previous" or "nothing"
    layers: int = 1  # decoder layers of a stage
    window: int | None = None

    @property
    def group(self) -> str:
        return "draft" if self.window is None else "draft_window"

    def shift(self, stage: int) -> int:
        return 0 if self.fed[stage] == "nothing" else stage + 1


KINDS = {
    "eagle3": Kind(save_eagle3, ("target",)),
    "eagle3-window": Kind(
        lambda at: save_eagle3(at, sliding_window=21), ("target",), window=21
    ),
    "eagle1": Kind(save_eagle1, ("target",)),
    "eagle1-stack": Kind(lambda at: save_eagle1(at, 2, "qkv"), ("target",), layers=2),
    "mtp": Kind(lambda at: save_mtp(at, 1), ("target",)),
    "mtp-target": Kind(
        lambda at: save_mtp(at, 3, chain_hidden_states=False), ("target",) * 3
    ),
    "mtp-previous": Kind(
        lambda at: save_mtp(at, 3, chain_hidden_states=True), ("target", "previous", "previous")
    ),
    "mtp-window": Kind(
        lambda at: save_mtp(
            at, 2, chain_hidden_states=True, layer_types=["sliding_attention"], sliding_window=9
        ),
        ("target", "previous"),
        window=9,
    ),
    "standalone": Kind(save_standalone, ("nothing",), layers=2),
}  # fmt: skip


@dataclass
class Rows:
    """A stage's rows of consecutive slots; in draft chains they grow."""

    first: int  # slot of the first row
    tokens: list[int]
    sources: list[Tensor]  # none of a stage that is fed nothing
    keys: list[Tensor] = field(default_factory=list)  # by decoder layer, [rows, 2, 16]
    values: list[Tensor] = field(default_factory=list)
    out: Tensor = field(default_factory=lambda: torch.zeros(0))  # [rows, hidden]

    def output(self, slot: int) -> Tensor:
        """Zero where there is no row."""
        return self.out[slot - self.first] if slot >= self.first else torch.zeros(HIDDEN)


class Reference:
    """What a draft of one kind computes for a text, in whole sequences."""

    def __init__(self, kind: Kind, target: Any, draft: Path) -> None:
        """``target``: transformers' model."""
        self.kind, self.target = kind, target
        if kind.fed == ("nothing",):
            import transformers

            self.model = transformers.AutoModelForCausalLM.from_pretrained(draft)
        else:
            prefix = "model.mtp_layers."
            self.w = {
                k.removeprefix(prefix): v for k, v in load_file(draft / "model.safetensors").items()
            }
            self.embedding = self.w.get(
                "embed_tokens.weight", self.target.get_input_embeddings().weight
            )
        self.features = cache(self._features)
        self.rows = cache(self._rows)
        self.propose = cache(self._propose)

    @torch.no_grad()
    def _features(self, text: tuple[int, ...]) -> Tensor:
        """What stages that are fed by the target get of each token."""
        states = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        if "midlayer.hidden_norm.weight" in self.w:
            return torch.cat([states[i + 1][0] for i in (0, 1, 2)], -1) @ self.w["fc.weight"].T
        return states[-1][0]

    @torch.no_grad()
    def _rows(self, text: tuple[int, ...], gap: int = 0) -> list[Rows]:
        """Every stage's rows; the target has seen all of ``text`` but its last token."""
        found: list[Rows] = []
        features = self.features(text[:-1]) if self.kind.fed != ("nothing",) else None
        for stage, fed in enumerate(self.kind.fed):
            first = gap + self.kind.shift(stage)
            slots = range(first, len(text))
            sources = []
            if fed == "target":
                assert features is not None
                sources = [features[slot - self.kind.shift(stage)] for slot in slots]
            elif fed == "previous":
                sources = [found[-1].output(slot - 1) for slot in slots]
            found.append(Rows(first, list(text[first:]), sources))
            if slots:
                self._compute(stage, found[-1])
        return found

    @torch.no_grad()
    def _propose(self, text: tuple[int, ...], steps: int, gap: int = 0) -> list[int]:
        """The chain after ``text``."""
        stages = [Rows(r.first, [*r.tokens], [*r.sources], out=r.out) for r in self.rows(text, gap)]
        last = len(stages) - 1
        found: list[int] = []
        for step in range(steps):
            found.append(self._best(stages[min(step, last)].output(len(text) + step - 1)))
            for stage in range(min(step + 1, last), last + 1):
                slot, shift = len(text) + step, self.kind.shift(stage)
                if slot < stages[stage].first:
                    continue
                stages[stage].tokens.append(found[-1])
                if self.kind.fed[stage] != "nothing":
                    if slot - shift >= len(text) - 1:
                        source = stages[stage].output(slot - 1)  # nobody knows the true one
                    elif self.kind.fed[stage] == "target":
                        source = self.features(text[:-1])[slot - shift]
                    else:
                        source = stages[stage - 1].output(slot - 1)
                    stages[stage].sources.append(source)
                self._compute(stage, stages[stage])
        return found

    def _best(self, hidden: Tensor) -> int:
        if self.kind.fed == ("nothing",):
            return int(self.model.get_output_embeddings()(hidden).argmax())
        if "d2t" in self.w:
            best = int((self.w["lm_head.weight"] @ self._norm(hidden, "norm")).argmax())
            return best + int(self.w["d2t"][best])
        return int(self.target.get_output_embeddings()(hidden).argmax())

    def _compute(self, stage: int, rows: Rows) -> None:
        """Keys, values and outputs of all rows anew."""
        if self.kind.fed == ("nothing",):
            at = torch.arange(rows.first, rows.first + len(rows.tokens))
            out = self.model(
                torch.tensor([rows.tokens]), position_ids=at[None], output_hidden_states=True
            )
            rows.keys = [layer.keys[0].transpose(0, 1) for layer in out.past_key_values.layers]
            rows.values = [layer.values[0].transpose(0, 1) for layer in out.past_key_values.layers]
            rows.out = out.hidden_states[-1][0]
            return
        embedded, source = self.embedding[torch.tensor(rows.tokens)], torch.stack(rows.sources)
        at = torch.arange(rows.first, rows.first + len(rows.tokens)) - self.kind.shift(stage)
        rows.keys, rows.values = [], []
        if "midlayer.hidden_norm.weight" in self.w:
            norms = (
                self._norm(embedded, "midlayer.input_layernorm"),
                self._norm(source, "midlayer.hidden_norm"),
            )
            rows.out = self._layer("midlayer.", source, torch.cat(norms, -1), at, rows)
        elif "fc.weight" in self.w:
            x = self._linear(torch.cat((embedded, source), -1), "fc")
            for i in range(self.kind.layers):
                mixed = self._norm(x, f"layers.{i}.input_layernorm") if i else x
                x = self._layer(f"layers.{i}.", x, mixed, at, rows)
            rows.out = x
        else:
            norms = (
                self._norm(source, f"{stage}.hidden_layernorm"),
                self._norm(embedded, f"{stage}.token_layernorm"),
            )
            x = self._linear(torch.cat(norms, -1), f"{stage}.input_proj")
            mixed = self._norm(x, f"{stage}.input_layernorm")
            x = self._layer(f"{stage}.", x, mixed, at, rows)
            rows.out = self._norm(x, f"{stage}.final_layernorm")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.w[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0)

    def _layer(
        self, prefix: str, residual: Tensor, mixed: Tensor, at: Tensor, rows: Rows
    ) -> Tensor:
        """A decoder layer over whole sequences; ``at`` are the rows' RoPE positions."""

        def rotate(x: Tensor) -> Tensor:
            angle = at[:, None] * 1e4 ** (-torch.arange(0, 16, 2) / 16)
            turn = torch.polar(torch.ones_like(angle), angle)[:, None]
            turned = torch.complex(x[..., :8].contiguous(), x[..., 8:].contiguous()) * turn
            return torch.cat((turned.real, turned.imag), -1)

        q, k, v = (
            self._linear(mixed, f"{prefix}self_attn.{n}_proj").unflatten(-1, (-1, 16))
            for n in "qkv"
        )
        q, k = rotate(q), rotate(k)
        rows.keys.append(k)
        rows.values.append(v)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 4
        back = at[:, None] - at
        seen = (back >= 0) & (back < (self.kind.window or len(at) + 1))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mean = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(2, 1)).flatten(1)
        x = residual + self._linear(mean, f"{prefix}self_attn.o_proj")
        y = self._norm(x, f"{prefix}post_attention_layernorm")
        gate = functional.silu(self._linear(y, f"{prefix}mlp.gate_proj"))
        return x + self._linear(
            gate * self._linear(y, f"{prefix}mlp.up_proj"), f"{prefix}mlp.down_proj"
        )
