"""Loading targets: what is served, and what is refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import (
    PAGE,
    VOCAB,
    save_target,
)

from kvkeep.models.target.hf import load_target
from kvkeep.models.target.model import Target
from kvkeep.models.tokenizer import load_tokenizer
from kvkeep.schema import ConfigError, UnsupportedModel

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("models") / "target", "Llama")


@pytest.fixture(scope="module")
def target(directory: Path) -> Target:
    return load_target(directory)


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_target_says_what_it_is(target: Target) -> None:
    assert (target.vocab_size, target.context_length, target.num_layers) == (VOCAB, 2048, 4)
    assert target.eos_ids == {2}
    assert target.dtype_name == "F32"
    (group,) = target.groups(PAGE)
    assert group.name == "full"
    assert group.sharded
    assert group.required
    assert [(c.name, c.layers, c.shape, c.dtype) for c in group.components] == [
        (name, (0, 1, 2, 3), (PAGE, 2, 16), "F32") for name in "kv"
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(directory: Path, dtype: str) -> None:
    target = load_target(directory, dtype)
    assert target.dtype == getattr(torch, dtype)
    assert target.groups(PAGE)[0].components[0].dtype == target.dtype_name != "F32"


def test_digest_follows_weights_and_what_shapes_the_forward_pass(tmp_path: Path) -> None:
    root = save_target(tmp_path / "target", "Llama")
    first = load_target(root).digest
    edit_config(root, eos_token_id=5, transformers_version="0")
    assert load_target(root).digest == first
    edit_config(root, rms_norm_eps=1e-3)
    second = load_target(root).digest
    weights = load_file(root / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    assert len({first, second, load_target(root).digest}) == 3


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no initial state": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
        "num_experts_per_tok": 1, "mamba_dt_rank": 4, "mamba_d_state": 8},
        "jamba: its scan takes no initial state"),
    "no attention": ("Mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1,
        "chunk_size": 16, "num_attention_heads": None}, "mamba2: on pages, tokens 0 to 13 differ"),
    "chunked": ("Llama4Text", {"head_dim": 16, "num_local_experts": 2},
        "layers of an unknown kind: chunked_attention"),
    "no hook": ("Bloom", {}, "bloom: layers \\[0, 1, 2, 3\\] do not reach"),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4,
        "factor": 2.0}}, "'dynamic' depends on the sequence length"),
    "longrope": ("Phi3", {"pad_token_id": 0, "eos_token_id": 1, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8}, "original_max_position_embeddings": 64}, "'longrope'"),
}  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_named(case: str, tmp_path: Path) -> None:
    family, options, message = REFUSED[case]
    root = save_target(tmp_path / "target", family, **options)
    with pytest.raises(UnsupportedModel, match=message):
        load_target(root)


def test_other_configs_that_are_refused(tmp_path: Path) -> None:
    root = save_target(tmp_path / "target", "Llama")
    original = (root / "config.json").read_text()
    for changes, message in (
        ({"model_type": "t5"}, "t5"),
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "more than text"),
    ):
        (root / "config.json").write_text(original)
        edit_config(root, **changes)
        with pytest.raises(UnsupportedModel, match=message):
            load_target(root)


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected config\.json and"):
        load_target(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="safetensors"):
        load_target(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    for text, message in (("{", "not JSON"), ("[]", "not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_target(tmp_path)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    root = save_target(tmp_path / "target", "Llama")
    weights = load_file(root / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights: model\.norm\.weight"):
        load_target(root)


def test_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    for damaged in ("{", "{}", "[]", '{"added_tokens": [], "model": {"type": "New"}}'):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(ConfigError, match="cannot load the tokenizer"):
            load_tokenizer(tmp_path)
    fast = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("b a c") == [1, 0, 2]
    assert tokenizer.is_fast


def test_importing_models_does_not_import_transformers() -> None:
    code = "import sys, kvkeep.engine.runner; sys.exit('transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
