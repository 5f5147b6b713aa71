"""What every model directory and every draft has in common; no network here."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ..media.arrival import Arrival
from ..schema import ConfigError, Group

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

    @property
    def arriving(self) -> Sequence[Arrival]:
        """What of it is still being loaded: a target's layer waits for its part of each, whoever
        else reads for all."""

    def slots(self, group: str) -> NDArray[np.int32]:
        """``[pages]`` slots of a group; -1: the page has none."""

    def working(self, group: str) -> NDArray[np.int32]:
        """``[Group.working]`` slots of the running state, which pages do not share."""


class Run(NamedTuple):
    """One sequence's rows in a pass."""

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


class Source(enum.Enum):
    """What a draft's row mixes its token with."""

    NOTHING = enum.auto()  # a model of its own: the token is all it gets
    TARGET = enum.auto()  # the target's feature, as :meth:`Draft.fuse` makes it
    PREVIOUS = enum.auto()  # the output of the stage before


class Stage(NamedTuple):
    """A draft layer, or a stack of them that runs at once: whose rows, and of what they are made.

    ::

        token     0     1     2     3    ...
        shift 1         0     1     2         row i: token i and the feature of token i - 1
        shift 2               0     1         row i: token i and the feature of token i - 2,
                                              or stage 0's output in row i - 1

    Row i lies in slot i, at RoPE position i - shift, and predicts token i + 1. The first ``shift``
    slots hold no row. Every row is a function of tokens [0, i] alone, whoever computed it.
    """

    shift: int  # of stage k: k + 1, or 0 where the source is nothing
    source: Source

    @property
    def lag(self) -> int:
        """Tokens from a row's source to the row's own, in what feeds the stage."""
        return 1 if self.source is Source.PREVIOUS else self.shift


class Draft(Protocol):
    """A draft network. Called on the engine's thread, inside ``torch.inference_mode``.

    A chain's first token is read off stage 0, the next off stage 1, and all that follow off the
    last stage. Once a chain is longer than a stage's shift, the features that the stage would mix
    in are of tokens that the target has not seen; its own output in the row before takes their
    place.
    """

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """What of the target :meth:`fuse` reads, in order: see ``Target.capture``."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The row conventions. First those fed by the target, then those fed by the one before."""

    def groups(self, page_tokens: int) -> tuple[Group, ...]:
        """Keys and values, and unless the source is nothing, ``carry`` with a row per stage.

        Carry is the source of the first row after the page. So stage k's is the feature of the
        (k + 1)-th last token of the page, or stage k - 1's output in the page's last row.
        """

    def fuse(self, features: Tensor) -> Tensor:
        """Target features ``[rows, aux layers * target hidden]`` to ``[rows, hidden]``."""

    def forward(
        self,
        stage: int,
        tokens: Tensor,
        source: Tensor | None,
        runs: Sequence[Run],
        pools: Mapping[str, Pools],
    ) -> Tensor:
        """Run one stage over rows of many sequences, writing its keys and values into ``pools``.

        Args:
            tokens: ``[rows]`` int64, the rows' own tokens.
            source: ``[rows, hidden]``, what each row mixes in; None if the source is nothing.
            runs: where the rows go and what they see.
            pools: by group name.

        Returns:
            ``[rows, hidden]``: states for :meth:`propose`, and a source of later rows.
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
