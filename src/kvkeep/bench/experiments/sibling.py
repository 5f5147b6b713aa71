"""A model of the demo target's size, three of whose four layers see a sliding window alone."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...demo.run import TARGET

WINDOW = 512  # tokens


def save_sibling(directory: Path) -> Path:
    """Save a Gemma 3 with the demo's tokenizer and random weights, whose output says nothing."""
    import torch
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=8192,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for file in TARGET.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory
