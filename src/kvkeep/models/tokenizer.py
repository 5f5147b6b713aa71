"""Tokenizers of Hugging Face transformers. Nothing here needs PyTorch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ..schema import ConfigError


def without_torch() -> None:
    """Let transformers take PyTorch as not installed, in all of this process from now on.

    For a process that needs a tokenizer and no model: it starts sooner and takes less memory.
    Changes nothing where PyTorch has been imported.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would tell so


def load_tokenizer(directory: Path) -> Any:
    """Load the ``PreTrainedTokenizerFast`` of a local model directory.

    Raises:
        ConfigError: there is no tokenizer, or it has no ``tokenizer.json``.
    """
    from transformers import AutoTokenizer

    if not (directory / "tokenizer.json").is_file():
        raise ConfigError(f"{directory} has no tokenizer.json: a fast tokenizer is needed")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # tokenizers raises no narrower one for a file it cannot read
        raise ConfigError(f"cannot load the tokenizer of {directory}: {error}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer of {directory} is not a fast one")
    return tokenizer
