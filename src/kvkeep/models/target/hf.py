"""Models of Hugging Face transformers: no other file imports those.

A target model is transformers' own code with two parts replaced: its attention function and its
cache object. Both call a :class:`~kvkeep.models.target.context.ForwardContext`. No list says which
models work. A survey pass shows what a model keeps, and short passes on pages are compared with the
model's own attention when it is loaded: a difference means that it keeps something else.

Functions import transformers when called, because the import takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...schema import ConfigError, UnsupportedModel
from ..checkpoint import DTYPE_NAMES, KV_DTYPES, read_config, weights_digest
from .context import ForwardContext
from .model import ContextCache, Target
from .proof import expected_logits, prove, short_windows
from .survey import Inventory, Survey, states

_OURS = "kvkeep"  # our attention function's name in transformers' registry
_LAYERS = {
    "full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "attention",
    "mamba", "moe", "mlp",
}  # fmt: skip
"""Kinds of layers whose whole state our attention function or a recurrent layer keeps."""

_REFUSED = {"jamba": "its scan takes no initial state in transformers, so no state can be resumed"}


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Our attention function, with the signature that transformers asks for."""
    context: ForwardContext = options["ctx"]
    return context.attend(module.layer_idx, query, key, value, options), None


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_OURS, _attention)  # no mask function: masks stay None


def _cache(config: Any, context: ForwardContext) -> ContextCache:
    """A cache object that keeps recurrent layers' tensors, but no keys and values."""
    from transformers import DynamicCache

    class PoolCache(DynamicCache):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(config=config)
            self.context = context

        def update(
            self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_options: Any
        ) -> tuple[Tensor, Tensor]:
            return self.context.update(layer_idx, key, value)

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0  # transformers needs it only for positions and masks, which we give

    return PoolCache()


def load_target(
    directory: Path, dtype: str = "auto", device: str = "auto", kv_dtype: str = "auto"
) -> Target:
    """Load a causal language model from a local directory and prove that it can be served.

    Args:
        directory: ``config.json`` and ``*.safetensors`` in Hugging Face layout.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, else the model's.
        device: "cpu", "cuda", or "auto".
        kv_dtype: dtype of the key and value pools: "float32", "bfloat16", "float16", "fp8_e4m3",
            or "auto": the model's. Recurrent state keeps the dtype that the model gives it.

    Raises:
        ConfigError: not a model directory, or weights are missing.
        UnsupportedModel: the model needs something unsupported; the message names it.
    """
    raw = read_config(directory)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here")
    from transformers import AutoConfig, AutoModelForCausalLM  # after what is told at once
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        _check_config(config)
        model, info = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=_resolve(dtype, config, place),
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except UnsupportedModel:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise UnsupportedModel(f"transformers cannot load {directory}: {error}") from error
    if info["missing_keys"]:
        raise ConfigError(f"{directory} lacks weights: {', '.join(sorted(info['missing_keys']))}")
    return adopt(model.to(place), kv_dtype, weights_digest(directory, raw))


def adopt(model: Any, kv_dtype: str = "auto", digest: str = "") -> Target:
    """Prove that transformers' ``model`` can be served, and replace its attention with ours.

    Args:
        kv_dtype: see :func:`load_target`.
        digest: hash of weights and configuration, 32 hex digits.

    Raises:
        UnsupportedModel: the model needs something unsupported; the message names it.
    """
    _register()
    config = model.config
    model.eval().requires_grad_(False)
    try:
        cache, inventory = _examine(model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{config.model_type}: {error}") from error
    name = DTYPE_NAMES[model.dtype] if kv_dtype == "auto" else KV_DTYPES[kv_dtype]
    eos = (model.generation_config.eos_token_id, config.eos_token_id)
    ids = {i for one in eos if one is not None for i in ([one] if isinstance(one, int) else one)}
    return Target(model, cache, inventory, name, digest, frozenset(ids))


@torch.inference_mode()
def survey_config(config: Mapping[str, Any]) -> Inventory:
    """What a model of this ``config.json`` keeps, by one pass without weights (meta device).

    Raises:
        UnsupportedModel: the model cannot be served; the message says why.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # no warnings about kernels that a survey does not need
    try:
        known = AutoConfig.for_model(**config)
        _check_config(known)
        _register()
        with torch.device("meta"):  # batched_mm does not read which experts were chosen
            model = AutoModelForCausalLM.from_config(
                known, attn_implementation=_OURS, experts_implementation="batched_mm"
            )
            return _survey(model.eval())[1]
    except UnsupportedModel:
        raise
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"transformers cannot build this model: {error}") from error


@torch.inference_mode()
def _examine(model: Any) -> tuple[ContextCache, Inventory]:
    """Install our attention, find what the model keeps, and prove that it keeps nothing else.

    Raises:
        UnsupportedModel: the model cannot run on pages.
    """
    try:
        with short_windows(model):
            expected = expected_logits(model)
            model.set_attn_implementation(_OURS)
            prove(Target(model, *_survey(model), DTYPE_NAMES[model.dtype]), expected)
        return _survey(model)
    except UnsupportedModel:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"it does not run on pages: {error!r}") from error


def _survey(model: Any) -> tuple[ContextCache, Inventory]:
    survey = Survey()
    cache = _cache(model.config, survey)
    tokens = torch.arange(3, 5, device=model.device)[None]
    positions = torch.arange(2, device=model.device)[None]
    model(
        input_ids=tokens,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        ctx=survey,
    )
    return cache, Inventory([*survey.rows(), *states(cache.layers)], survey.window())


def rope(config: Mapping[str, Any]) -> nn.Module:
    """The rotary embedding of a Llama-like ``config.json``.

    It maps ``(x, positions [1, rows])`` to cos and sin.

    Raises:
        UnsupportedModel: its scaling depends on the sequence length at run time.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    llama = LlamaConfig(**config)
    _check_rope(llama)
    rotary: nn.Module = LlamaRotaryEmbedding(llama)
    return rotary


def _resolve(name: str, config: Any, device: torch.device) -> torch.dtype:
    own = config.dtype if config.dtype in DTYPE_NAMES and device.type != "cpu" else torch.float32
    return own if name == "auto" else getattr(torch, name)


def _check_config(config: Any) -> None:
    """Refuse by name what a pass over a few tokens cannot reveal."""
    kind = config.model_type
    if kind in _REFUSED:
        raise UnsupportedModel(f"{kind}: {_REFUSED[kind]}")
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{kind} is an encoder-decoder")
    if config.get_text_config() is not config:
        raise UnsupportedModel(f"{kind} takes more than text")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{kind} has quantised weights, which are not supported")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if others:
        raise UnsupportedModel(f"{kind} has layers of an unknown kind: {', '.join(others)}")
    if chunk := getattr(config, "attention_chunk_size", None):
        raise UnsupportedModel(f"{kind} attends in chunks ({chunk} tokens)")
    _check_rope(config)


def _check_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if (kind := one.get("rope_type")) in ("dynamic", "longrope"):
            raise UnsupportedModel(
                f"RoPE scaling {kind!r} depends on the sequence length at run time: "
                "cached keys of a short prompt would be wrong in a long one"
            )
