"""Everything that touches Hugging Face transformers; no other file imports it.

A target model is transformers' own code with one thing exchanged: its attention function. Rows of
many sequences are packed into one ``[1, rows]`` forward pass without a cache object, and our
function keeps keys and values in the page pools. Whether a model can be run like this is not
looked up in a list: it is *tried* when the model is loaded, against the model's own attention.

Transformers is imported inside functions, as that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..schema import Component, ConfigError, Group, UnsupportedModel
from . import attention
from .attention import Layout, Part
from .base import DTYPE_NAMES, Pools, read_config, weights_digest

_OURS = "kvkeep"  # our attention function's name in transformers' registry
_STATE_ATTRIBUTES = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "mamba_d_state": "Mamba layers",
    "quantization_config": "quantised weights",
}  # config attributes that name state or weights which only full attention in plain dtypes lacks


class _Step(NamedTuple):
    """What one forward pass hands to every attention call."""

    layout: Layout
    pools: Pools


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_OURS, _attention)  # and no mask function: masks stay None


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention signature: ``[1, heads, rows, head_dim]`` to ``[1, rows, ...]``."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if options.get(name) is not None:
            raise UnsupportedModel(f"attention with {name} is not supported")
    step: _Step = options["ctx"]
    layer = module.layer_idx
    keys, values = step.pools["k"][layer], step.pools["v"][layer]
    if key.shape[1::2] != keys.shape[2:] or value.shape[1::2] != values.shape[2:]:
        raise UnsupportedModel(
            f"layer {layer} has keys {tuple(key.shape[1::2])} and values "
            f"{tuple(value.shape[1::2])}, but its config says {tuple(keys.shape[2:])}"
        )
    attention.write(keys, key[0].transpose(0, 1), step.layout)
    attention.write(values, value[0].transpose(0, 1), step.layout)
    scale = options.get("scaling") or key.shape[-1] ** -0.5
    return attention.attend(query[0].transpose(0, 1), keys, values, step.layout, scale)[None], None


class Target:
    """A causal language model whose layers are all full attention.

    Called on the engine's thread, inside ``torch.inference_mode``.
    """

    def __init__(self, model: Any, digest: str, eos_ids: frozenset[int]) -> None:
        config = model.config
        self.digest = digest  # of weights and configuration, 32 hex digits
        self.eos_ids = eos_ids
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
        self.head_dim: int = getattr(config, "head_dim", None) or self.hidden_size // heads
        self.embedding: Tensor = model.get_input_embeddings().weight  # [vocab, hidden]
        self.head: nn.Module = model.get_output_embeddings()  # [rows, hidden] to [rows, vocab]
        self._model = model
        self._features: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    @property
    def dtype_name(self) -> str:
        """safetensors' name of the dtype that the model runs in."""
        return DTYPE_NAMES[self.dtype]

    def group(self, page_tokens: int) -> Group:
        """``k`` and ``v`` of every layer, ``[page_tokens, kv_heads, head_dim]``."""
        layers, shape = tuple(range(self.num_layers)), (page_tokens, self.kv_heads, self.head_dim)
        return Group("full", tuple(Component(n, layers, shape, self.dtype_name) for n in "kv"))

    def capture(self, layers: Sequence[int]) -> None:
        """From now on :meth:`forward` returns the outputs of these layers, in this order.

        The one after the last, ``num_layers``, stands for the final norm's output.
        """
        stack = next(
            m for m in self._model.modules()
            if isinstance(m, nn.ModuleList) and len(m) == self.num_layers
        )  # fmt: skip

        def keep(layer: int) -> Callable[[Any, Any, Any], None]:
            def hook(_module: Any, _args: Any, out: Any) -> None:
                self._features[layer] = out if isinstance(out, Tensor) else out[0]

            return hook

        modules = (*stack, self._model.base_model)

        for handle in self._hooks:
            handle.remove()
        self._features = dict.fromkeys(layers, torch.empty(0))
        self._hooks = [modules[layer].register_forward_hook(keep(layer)) for layer in layers]

    def forward(
        self, tokens: Tensor, layout: Layout, keep: Tensor, pools: Pools
    ) -> tuple[Tensor, Tensor | None]:
        """Run packed rows of many sequences, writing their keys and values into ``pools``.

        Args:
            tokens: ``[rows]`` int64.
            layout: where the rows go and what they see.
            keep: ``[kept]`` int64, rows whose logits are wanted; may be empty.
            pools: components ``k`` and ``v`` of :meth:`group`.

        Returns:
            Logits ``[kept, vocab]`` float32, and the captured layers' outputs side by side
            ``[rows, layers * hidden]``, or None without :meth:`capture`.
        """
        out = self._model(
            input_ids=tokens[None],
            position_ids=layout.positions[None],
            logits_to_keep=keep,
            use_cache=False,
            ctx=_Step(layout, pools),
        )
        features = [feature[0] for feature in self._features.values()]
        return out.logits[0].float(), torch.cat(features, -1) if features else None


def load_tokenizer(directory: Path) -> Any:
    """The ``PreTrainedTokenizerFast`` of a local model directory.

    Raises:
        ConfigError: no tokenizer there, or one without a ``tokenizer.json``.
    """
    from transformers import AutoTokenizer

    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"{directory} has no tokenizer.json: a fast tokenizer is needed")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load the tokenizer of {directory}: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer of {directory} is not a fast one")
    return tokenizer


def load_target(directory: Path, dtype: str = "auto", device: str = "auto") -> Target:
    """Load a causal language model from a local directory and prove that it can be served.

    Args:
        directory: ``config.json`` and ``*.safetensors`` in Hugging Face layout.
        dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, else the model's.
        device: "cpu", "cuda", or "auto".

    Raises:
        ConfigError: not a model directory, or weights are missing.
        UnsupportedModel: something in the model is not supported; the message names it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    raw = read_config(directory)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        _check_config(config)
        _register()
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
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UnsupportedModel(f"transformers cannot load {directory}: {error}") from error
    if info["missing_keys"]:
        raise ConfigError(f"{directory} lacks weights: {', '.join(sorted(info['missing_keys']))}")
    model.to(place).eval().requires_grad_(False)
    eos = (model.generation_config.eos_token_id, config.eos_token_id)
    ids = {i for one in eos if one is not None for i in ([one] if isinstance(one, int) else one)}
    target = Target(model, weights_digest(directory, raw), frozenset(ids))
    _prove(model, target)
    return target


def rope(config: Mapping[str, Any]) -> nn.Module:
    """Rotary embedding of a Llama-like ``config.json``: ``(x, positions [1, rows])`` to cos, sin.

    Raises:
        UnsupportedModel: the kind of scaling depends on the sequence length at run time.
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
    """Refuse by name what full attention over plain key and value pages cannot serve."""
    kind = config.model_type
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{kind} is an encoder-decoder")
    if config.get_text_config() is not config:
        raise UnsupportedModel(f"{kind} takes more than text")
    for name, meaning in _STATE_ATTRIBUTES.items():
        if getattr(config, name, None) is not None:
            raise UnsupportedModel(f"{kind} has {meaning}, which is not supported")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if others:
        raise UnsupportedModel(f"{kind} has layers that are not full attention: {others}")
    if window := getattr(config, "sliding_window", None):
        raise UnsupportedModel(f"{kind} has sliding-window attention ({window} tokens)")
    _check_rope(config)


def _check_rope(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if (kind := one.get("rope_type")) in ("dynamic", "longrope"):
            raise UnsupportedModel(
                f"RoPE scaling {kind!r} depends on the sequence length at run time: "
                "cached keys of a short prompt would be wrong in a long one"
            )


@torch.inference_mode()
def _prove(model: Any, target: Target) -> None:
    """Compare two packed, paged passes with one pass of the model's own attention.

    State that does not go through our function (recurrent layers), biases that live in a mask and
    packed sequences that see each other all show as a difference. On return, ours is in place.

    Raises:
        UnsupportedModel: a layer did not reach our function, or the logits differ.
    """
    kind, device = model.config.model_type, target.device
    tokens = (torch.arange(29, device=device) * 7 + 3) % target.vocab_size  # 24, and 5 of another
    expected = model(input_ids=tokens[None, :24], use_cache=False).logits[0, 12:].float()
    model.set_attn_implementation(_OURS)
    pools = {
        c.name: [torch.full((9, *c.shape), torch.nan).to(device, target.dtype) for _ in c.layers]
        for c in target.group(4).components
    }
    main, other = np.array([8, 3, 7, 4, 6, 5], np.int32), np.array([2, 1], np.int32)
    first = Layout.of([Part(main, 0, 12)], 4, device)
    second = Layout.of([Part(other, 0, 5), Part(main, 12, 12)], 4, device)
    try:
        target.forward(tokens[:12], first, torch.arange(0, device=device), pools)
        rows = torch.arange(5, 17, device=device)
        both = torch.cat((tokens[24:], tokens[12:24]))
        logits, _ = target.forward(both, second, rows, pools)
    except TypeError as error:
        raise UnsupportedModel(f"{kind} does not hand our arguments to attention") from error
    missed = [i for i, keys in enumerate(pools["k"]) if keys[3:].isnan().any()]
    if missed:
        raise UnsupportedModel(f"{kind}: layers {missed} do not reach the attention hook")
    off = ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median()
    if not off < (1e-3 if target.dtype == torch.float32 else 0.1):
        raise UnsupportedModel(
            f"{kind}: paged attention differs from the model's own by {off:.1e}; "
            "it keeps state elsewhere or has a special mask"
        )
