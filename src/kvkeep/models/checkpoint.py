"""Model directories in Hugging Face layout: ``config.json``, ``*.safetensors``, names of dtypes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from ..schema import ConfigError

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
"""Dtypes that models run in, and safetensors' names for them."""

KV_DTYPES: Mapping[str, str] = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "fp8_e4m3": "F8_E4M3",
}
"""Dtypes that pools of keys and values may have, and safetensors' names for them."""

_NOT_FORWARD = {
    "_name_or_path", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Keys of ``config.json`` that do not affect a forward pass."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read ``config.json`` of a local model directory, which must hold ``*.safetensors`` too.

    Raises:
        ConfigError: a file is missing, or ``config.json`` is not a JSON object.
    """
    file = directory / "config.json"
    if not file.is_file() or not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{directory} is not a model directory: expected config.json and *.safetensors "
            "(local files only; other weight formats are not read)"
        )
    for weights in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(weights, framework="np"):
                pass
        except SafetensorError as error:
            raise ConfigError(f"{weights} is damaged: {error}") from error
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return config


def weights_digest(directory: Path, config: Mapping[str, Any]) -> str:
    """A hash of all weight files and of the settings that affect a forward pass, 32 hex digits."""
    hasher = xxhash.xxh3_128()
    kept = {key: value for key, value in config.items() if key not in _NOT_FORWARD}
    hasher.update(json.dumps(kept, sort_keys=True).encode())
    buffer = memoryview(bytearray(1 << 22))
    for path in sorted(directory.glob("*.safetensors")):
        hasher.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                hasher.update(buffer[:size])
    return hasher.hexdigest()
