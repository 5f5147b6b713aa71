"""What every model directory and every draft has in common; no network here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ..schema import ConfigError, Group
from .attention import Layout

Pools = Mapping[str, Sequence[Tensor]]
"""One group's device pools: component name -> one ``[slots, *shape]`` tensor per layer."""

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
"""safetensors' names of the dtypes that models run in."""

KV_DTYPES: Mapping[str, str] = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "fp8_e4m3": "F8_E4M3",
}
"""What keys and values may be kept in, and safetensors' names for it."""

_NOT_FORWARD = {
    "_name_or_path", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Keys of ``config.json`` that do not change a forward pass."""


class Tables(Protocol):
    """Where a sequence's state lies: the part of a lease that a forward pass reads."""

    def slots(self, group: str) -> NDArray[np.int32]:
        """``[pages]`` slots of a group; -1: the page has none."""

    def working(self, group: str) -> NDArray[np.int32]:
        """``[Group.working]`` slots of the running state, which pages do not share."""


class Run(NamedTuple):
    """One sequence's rows in a target pass."""

    tables: Tables
    start: int  # position of the first row
    rows: int  # at least 1
    keep: int = 0  # last rows whose logits are wanted
    first: int = 0  # positions before are never read


class Step(Protocol):
    """What a model's layers meet in one pass: its attention function and its cache object.

    Heads lie before positions, as in transformers: ``[batch, heads, rows, dim]``.
    """

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """New rows as they are cached; returns what the layer goes on with."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """``[batch, rows, heads, value dim]``."""


class DraftLayer(NamedTuple):
    """Which row of a draft layer belongs to token i: (token i, source of token i - shift)."""

    shift: int  # the first ``shift`` tokens have no row; RoPE position i - shift
    source: str  # "fused": the target's features through the draft's own projection


class Draft(Protocol):
    """A draft network. Called on the engine's thread, inside ``torch.inference_mode``."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs :meth:`fuse` reads, in order."""

    @property
    def layers(self) -> tuple[DraftLayer, ...]:
        """The row convention of each layer."""

    def group(self, page_tokens: int) -> Group:
        """Components ``k`` and ``v``, and ``carry``: the fused feature of a page's last token."""

    def fuse(self, features: Tensor) -> Tensor:
        """Target features ``[rows, aux layers x target hidden]`` to ``[rows, hidden]``."""

    def forward(self, tokens: Tensor, source: Tensor, layout: Layout, pools: Pools) -> Tensor:
        """Write the K/V rows of ``layout`` and attend.

        Args:
            tokens: ``[rows]`` int64, the rows' own tokens.
            source: ``[rows, hidden]``, each row's source: a fused feature, or in a chain the
                output of the row before.

        Returns:
            ``[rows, hidden]``: states for :meth:`propose`, and the next chain step's source.
        """

    def propose(self, hidden: Tensor) -> Tensor:
        """The likeliest next token of each state: ``[n, hidden]`` to ``[n]`` int64 target ids."""


def read_config(directory: Path) -> dict[str, Any]:
    """``config.json`` of a local model directory that also holds ``*.safetensors``.

    Raises:
        ConfigError: it is not such a directory.
    """
    file = directory / "config.json"
    if not file.is_file() or not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{directory} is not a model directory: expected config.json and *.safetensors "
            "(local files only; other weight formats are not read)"
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return config


def weights_digest(directory: Path, config: Mapping[str, Any]) -> str:
    """32 hex digits over all weight files and the configuration that shapes a forward pass."""
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
