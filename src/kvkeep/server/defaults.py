"""What the model's files say about requests: sampling defaults and the chat template."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ..engine.messages import Sampling
from ..schema import ConfigError, RequestError

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SAMPLED = tuple(name for name in _NAMES if name in Sampling.__struct_fields__)
"""Sampling parameters that a model may have defaults for."""

log = logging.getLogger(__name__)


def sampling_defaults(model: Path) -> dict[str, Any]:
    """Sampling parameters in the ``generation_config.json`` of a model directory, if there is one.

    Raises:
        ConfigError: the file is not a JSON object, or a value is not allowed.
    """
    file = model / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        said = {name: found[name] for name in _NAMES if found.get(name) is not None}
        if said.get("top_k") == 0:  # as transformers turns it off
            said["top_k"] = -1
        defaults = {name: value for name, value in said.items() if name in SAMPLED}
        Sampling(**defaults)
    except (AttributeError, OSError, TypeError, ValueError, RequestError) as error:
        raise ConfigError(f"{file}: {error}; --sampling-defaults openai ignores it") from error
    if ignored := said.keys() - defaults.keys():
        log.warning("%s: %s is not supported", file, ", ".join(sorted(ignored)))
    return defaults


def chat_template(file: Path) -> str:
    """The chat template in ``file``.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}") from error
