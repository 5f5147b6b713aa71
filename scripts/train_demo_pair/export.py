"""Writes and reads the pair: bf16 checkpoints in the formats that serving engines read."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .data import BOS, EOS, PROMPT_TOKENS, VOCAB_SIZE, tiled_prompt
from .model import FEATURE_LAYERS, ROPE_THETA, Draft, llama_config, new_draft

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
FIXED_PROMPTS = 4  # of each kind


def save_target(target: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write a Hugging Face directory: configs, weights and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in target.state_dict().items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(
        directory / "config.json", _config_fields(4) | {"architectures": ["LlamaForCausalLM"]}
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def save_draft(draft: Draft, directory: Path) -> None:
    """Write an EAGLE-3 directory: config, weights and identity maps between the vocabularies."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in draft.state_dict().items()
    }
    # d2t: draft id -> target id minus draft id. t2d: whether the draft can propose a target id.
    weights["d2t"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    weights["t2d"] = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(
        directory / "config.json",
        _config_fields(1)
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": VOCAB_SIZE,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(FEATURE_LAYERS),
                "use_aux_hidden_state": True,
            },
        },
    )


def save_prompts(path: Path) -> None:
    """Write the fixed prompts: the first four of each kind, none chosen by their results."""
    kinds = {"period-64": 64, "period-200": 200, "decoy": PROMPT_TOKENS}
    prompts = {
        kind: [tiled_prompt(index, period) for index in range(FIXED_PROMPTS)]
        for kind, period in kinds.items()
    }
    lines = ",\n".join(
        f'"{kind}": [\n' + ",\n".join(json.dumps(ids) for ids in rows) + "\n]"
        for kind, rows in prompts.items()
    )
    path.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def load_target(directory: Path) -> LlamaForCausalLM:
    """Read an exported target; its bf16 weights are converted to fp32."""
    target = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return target.eval().requires_grad_(False)


def load_draft(directory: Path) -> Draft:
    """Read an exported draft; its bf16 weights are converted to fp32."""
    weights = load_file(directory / "model.safetensors")
    del weights["d2t"], weights["t2d"]
    draft = new_draft()
    draft.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return draft.eval().requires_grad_(False)


def _config_fields(layers: int) -> dict[str, object]:
    fields: dict[str, object] = llama_config(layers).to_diff_dict()
    # Readers older than `rope_parameters` expect `rope_theta`.
    return fields | {"dtype": "bfloat16", "torch_dtype": "bfloat16", "rope_theta": ROPE_THETA}


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
