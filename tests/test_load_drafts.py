"""Loading drafts: what is served, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_kinds import save_eagle1, save_eagle3, save_mtp
from tiny_models import HIDDEN, PAGE, VOCAB, draft_tensors, save_draft, save_target
from torch import Tensor

from kvkeep.models.drafts.loading import load_draft
from kvkeep.models.target.hf import load_target
from kvkeep.models.target.model import Target
from kvkeep.schema import ConfigError, DraftMismatch, UnsupportedModel

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(save_target(tmp_path_factory.mktemp("models") / "target", "Llama"))


def test_a_draft_says_what_it_is(target: Target, tmp_path: Path) -> None:
    draft = load_draft(save_draft(tmp_path), target)
    (group,) = draft.groups(PAGE)
    assert draft.aux_layers == (0, 1, 2)
    assert (group.name, group.sharded, group.required) == ("draft", False, False)
    assert [(c.name, c.layers, c.shape) for c in group.components] == [
        ("k", (0,), (PAGE, 2, 16)),
        ("v", (0,), (PAGE, 2, 16)),
        ("carry", (0,), (HIDDEN,)),
    ]
    tensors = draft_tensors()
    tensors["norm.weight"][0] += 1
    other = load_draft(save_draft(tmp_path / "b", tensors), target)
    config = {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}
    third = load_draft(save_draft(tmp_path / "c", eagle_config=config), target)
    assert len({group.source, other.groups(PAGE)[0].source, third.groups(PAGE)[0].source}) == 3


def test_without_ids_the_default_layers_are_read(tmp_path: Path) -> None:
    deep = load_target(save_target(tmp_path / "target", "Llama", num_hidden_layers=8))
    draft = load_draft(save_draft(tmp_path / "draft", eagle_config=None), deep)
    assert draft.aux_layers == (1, 3, 4)


def test_optional_tensors(target: Target, tmp_path: Path) -> None:
    tensors = draft_tensors()
    tensors["embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    tensors |= {
        f"midlayer.self_attn.{name}_proj.bias": torch.ones(size)
        for name, size in {"q": 64, "k": 32, "v": 32, "o": 64}.items()
    }
    tensors["lm_head.weight"] = torch.randn(VOCAB, HIDDEN)
    del tensors["d2t"], tensors["t2d"]
    root = save_draft(tmp_path, tensors, attention_bias=True, draft_vocab_size=None)
    draft = load_draft(root, target)
    states = torch.randn(3, HIDDEN)
    normed = states * tensors["norm.weight"] / states.pow(2).mean(-1, keepdim=True).sqrt()
    expected = (normed @ tensors["lm_head.weight"].T).argmax(-1)
    assert draft.propose(states).tolist() == expected.tolist()


Change = Callable[[dict[str, Tensor]], Any]
MISFITS: dict[str, tuple[dict[str, Any], Change | None, type[ConfigError], str]] = {
    "other format": ({"architectures": ["LlamaForCausalLMEagle"]}, None, DraftMismatch,
        "not those of its architecture"),
    "layers": ({"num_hidden_layers": 2}, None, UnsupportedModel, "1 layer, not 2"),
    "partial rope": ({"partial_rotary_factor": 0.5}, None, UnsupportedModel, "partial_rotary"),
    "quantised": ({"quantization_config": {"bits": 4}}, None, UnsupportedModel, "quantization"),
    "norm order": ({"norm_before_residual": True}, None, UnsupportedModel, "norm_before_residual"),
    "activation": ({"hidden_act": "gelu"}, None, UnsupportedModel, "gelu"),
    "not aux": ({"eagle_config": {"use_aux_hidden_state": False}}, None, UnsupportedModel,
        "not EAGLE-3"),
    "top-level ids": ({"eagle_aux_hidden_state_layer_ids": [1]}, None, UnsupportedModel,
        "counts layers differently"),
    "last layer": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, None,
        DraftMismatch, "below the last"),
    "twice": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}, None,
        DraftMismatch, "must differ"),
    "default ids": ({"eagle_config": None}, None, DraftMismatch, "must differ"),
    "rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, None, UnsupportedModel,
        "'dynamic'"),
    "vocabulary": ({"vocab_size": 120}, None, DraftMismatch, "120 tokens, the target's 128"),
    "heads": ({"num_key_value_heads": 3}, None, DraftMismatch, "4 draft heads"),
    "no size": ({"hidden_size": 32}, None, DraftMismatch, "missing \\['embed_tokens.weight'"),
    "missing": ({}, lambda t: t.pop("norm.weight"), DraftMismatch, "missing \\['norm.weight'\\]"),
    "no d2t": ({}, lambda t: t.pop("d2t"), DraftMismatch, "missing \\['d2t'\\]"),
    "unexpected": ({}, lambda t: t.update(medusa=torch.zeros(1)), DraftMismatch, "'medusa'"),
    "bias": ({"attention_bias": True}, None, DraftMismatch, "q_proj.bias"),
    "fc": ({}, lambda t: t.update({"fc.weight": torch.zeros(64, 64)}), DraftMismatch,
        "fc.weight is \\(64, 64\\), expected \\(64, 192\\)"),
    "t2d length": ({}, lambda t: t.update(t2d=torch.zeros(9, dtype=torch.bool)), DraftMismatch,
        "t2d"),
    "d2t range": ({}, lambda t: t["d2t"].add_(60), DraftMismatch, "d2t leads to"),
    "d2t is ids": ({}, lambda t: t["t2d"].logical_not_(), DraftMismatch, "different tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_drafts_that_do_not_fit_are_named(case: str, target: Target, tmp_path: Path) -> None:
    options, change, error, message = MISFITS[case]
    tensors = draft_tensors()
    if change is not None:
        change(tensors)
    root = save_draft(tmp_path, tensors, **options)
    with pytest.raises(error, match=message):
        load_draft(root, target)


def test_a_draft_config_may_lack_nothing(target: Target, tmp_path: Path) -> None:
    root = save_draft(tmp_path)
    config = json.loads((root / "config.json").read_text())
    del config["intermediate_size"]
    (root / "config.json").write_text(json.dumps(config))
    with pytest.raises(DraftMismatch, match="lacks intermediate_size"):
        load_draft(root, target)


def test_what_the_drafts_read_of_the_target(target: Target, tmp_path: Path) -> None:
    """Of the target's layers, the one after the last is its final norm."""
    for directory in (save_eagle1(tmp_path / "eagle"), save_mtp(tmp_path / "mtp", 1)):
        assert load_draft(directory, target).aux_layers == (4,)
    alone = save_target(tmp_path / "alone", "Llama", num_hidden_layers=1)
    assert load_draft(alone, target).aux_layers == ()


def one_layer(directory: Path) -> Path:
    return save_mtp(directory, 1)


OTHER_MISFITS: dict[str, tuple[Callable[..., Path], dict[str, Any], type[ConfigError], str]] = {
    "hidden": (save_eagle1, {"hidden_size": 32}, DraftMismatch, "size is 32, the target's 64"),
    "hot": (save_eagle1, {"hot_vocab_size": 9}, UnsupportedModel, "hot_vocab_size"),
    "missing layer": (save_eagle1, {"num_hidden_layers": 2}, DraftMismatch, "'layers.1.input_lay"),
    "bias": (save_eagle1, {"architectures": ["Qwen2ForCausalLMEagle"]}, DraftMismatch,
        "k_proj.bias"),
    "no layers": (one_layer, {"num_nextn_predict_layers": 0}, DraftMismatch, "predict_layers 0"),
    "mtp layer": (one_layer, {"num_nextn_predict_layers": 2, "chain_hidden_states": True},
        DraftMismatch, "missing \\['1.final_layernorm"),
    "what feeds": (one_layer, {"num_nextn_predict_layers": 2}, UnsupportedModel,
        "leaves open what feeds the 2"),
    "mtp hidden": (one_layer, {"hidden_size": 32}, DraftMismatch, "size is 32, the target's 64"),
    "which window": (one_layer, {"use_sliding_window": True, "sliding_window": 9,
        "max_window_layers": 1}, UnsupportedModel, "leaves open which draft layers"),
    "mixed": (save_eagle3, {"layer_types": ["full_attention", "sliding_attention"]},
        UnsupportedModel, "'sliding_attention'\\] is not supported"),
    "no window": (save_eagle3, {"layer_types": ["sliding_attention"]}, DraftMismatch,
        "sliding_window None"),
    "moe": (one_layer, {"architectures": ["DeepseekV3ForCausalLMNextN"]}, UnsupportedModel,
        "'DeepseekV3ForCausalLMNextN'.*; supported are one of LlamaForCausalLMEagle3, "),
    "two": (one_layer, {"architectures": ["MiMoMTP", "LlamaForCausalLM"]}, UnsupportedModel,
        "'MiMoMTP', 'LlamaForCausalLM'"),
    "which part": (one_layer, {"architectures": ["LlamaForCausalLM"]}, UnsupportedModel,
        "LlamaForCausalLM with 1 prediction layers leaves open"),
    "unnamed": (save_eagle1, {"architectures": ["LlamaForCausalLM"]}, ConfigError, "lacks weights"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_MISFITS)
def test_other_drafts_that_do_not_fit(case: str, target: Target, tmp_path: Path) -> None:
    save, options, error, message = OTHER_MISFITS[case]
    root = save(tmp_path)
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | options))
    with pytest.raises(error, match=message):
        load_draft(root, target)


def test_models_that_are_no_draft_of_this_target(target: Target, tmp_path: Path) -> None:
    for options, message in (
        ({"vocab_size": 120}, "vocabulary has 120 tokens, the target's 128"),
        ({"max_position_embeddings": 512}, "made for 512 tokens, the target for 2048"),
    ):
        root = save_target(tmp_path / message[:4], "Llama", num_hidden_layers=1, **options)
        with pytest.raises(DraftMismatch, match=message):
            load_draft(root, target)


@pytest.mark.parametrize(
    ("options", "tail"),
    [
        ({"sliding_window": 512, "use_sliding_window": False, "max_window_layers": 28}, None),
        ({"sliding_window": 512, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 17}, 1),
        ({"sliding_window": 18}, 2),
        ({"sliding_window": 1, "layer_types": ["sliding_attention"]}, 1),
    ],
)
def test_windows(options: dict[str, Any], tail: int | None, target: Target, tmp_path: Path) -> None:
    (group,) = load_draft(save_eagle3(tmp_path, **options), target).groups(PAGE)
    assert (group.name, group.tail) == ("draft_window" if tail else "draft", tail)
