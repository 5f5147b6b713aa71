"""Load a draft of any kind from a model directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...schema import UnsupportedModel
from ..checkpoint import read_config
from ..target.model import Target
from . import eagle1, eagle3, mtp, standalone
from .interface import Draft

EAGLE3 = "LlamaForCausalLMEagle3"

_FORMATS: Mapping[str, Callable[[Path, Mapping[str, Any], Target], Draft]] = {
    EAGLE3: eagle3.load,
    "LlamaForCausalLMEagle": eagle1.load,
    "Qwen2ForCausalLMEagle": eagle1.load,
    "MiMoForCausalLM": mtp.load,
    "MiMoMTP": mtp.load,
}
"""Loaders, by the only name in a config's ``architectures``."""


def load_draft(directory: Path, target: Target) -> Draft:
    """Load a draft from a local directory and check that it fits ``target``.

    Any causal language model that transformers knows is a standalone draft.

    Raises:
        ConfigError: not a model directory.
        UnsupportedModel: the kind of draft or a setting is unsupported, or the config is ambiguous.
        DraftMismatch: weights do not fit the draft's config or the target.
    """
    config = read_config(directory)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and len(names) == 1 else ""
    if name in _FORMATS:
        return _FORMATS[name](directory, config, target)
    if not name.endswith("ForCausalLM"):
        raise UnsupportedModel(
            f"draft architecture {names}; supported are one of {', '.join(_FORMATS)}, and causal "
            "language models"
        )
    if count := config.get("num_nextn_predict_layers"):
        raise UnsupportedModel(
            f"{name} with {count} prediction layers leaves open what drafts: these layers, which "
            "are not supported, or the model itself; for that, set num_nextn_predict_layers to 0"
        )
    return standalone.load(directory, target)
