"""An engine's parts, from its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cache import Cache
from ..media.memory import Memory
from ..models.base import Draft
from ..models.eagle3 import load_draft
from ..models.hf import Target, load_target, load_tokenizer
from ..policy import Policy
from ..schema import ConfigError, Identity, Schema
from ..stores.base import Store
from ..stores.file import FileStore
from .config import EngineConfig
from .messages import ModelInfo
from .runner import Runner

_CPU_POOL_BYTES = 1 << 30  # device pool on a CPU when nothing is said
_CPU_POOL_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine runs on."""

    target: Target
    tokenizer: Any
    runner: Runner
    cache: Cache
    info: ModelInfo
    lookahead: int  # tokens past the known ones that a decoding step may write


def open_store(config: EngineConfig, schema: Schema) -> Store | None:
    """The storage tier that ``config`` asks for, if any.

    Raises:
        ConfigError: the directory cannot be used.
    """
    if config.storage_dir is None:
        return None
    sizes = {schema.fingerprint(group): group.record_bytes for group in schema.groups}
    return FileStore(config.storage_dir, sizes, config.storage_bytes)


OpenStore = Callable[[EngineConfig, Schema], Store | None]
"""What makes an engine's storage tier, such as :func:`open_store`."""


def build(config: EngineConfig, store: OpenStore = open_store) -> Parts:
    """Load the models, size the pools and open the storage tier.

    Raises:
        ConfigError: something does not fit; the message says what.
    """
    target = load_target(config.model, config.dtype, config.device)
    tokenizer = load_tokenizer(config.model)
    draft = load_draft(config.draft, target) if config.draft else None
    schema = _schema(config, target, draft)
    lookahead = config.num_steps + 1 if draft else 1
    device_pages = _device_pages(config, schema, target)
    context = _context_length(config, target, device_pages, lookahead)
    host_pages = _host_pages(config, schema, device_pages)
    groups = len(schema.groups)
    memory = Memory(schema, [device_pages] * groups, [host_pages] * groups, str(target.device))
    cache = Cache(
        schema,
        [device_pages] * groups,
        [host_pages] * groups,
        store(config, schema),
        Policy(prefetch=config.prefetch_policy, write=config.write_policy, missing=config.missing),
        memory,
    )
    runner = Runner(target, draft, memory.pools, config.page_size, config.num_steps)
    info = ModelInfo(
        name=config.served_name or _name(config.model),
        context_length=context,
        vocab_size=target.vocab_size,
        page_tokens=config.page_size,
        draft=_name(config.draft) if config.draft else None,
        pools={"device": device_pages * config.page_size, "host": host_pages * config.page_size},
    )
    return Parts(target, tokenizer, runner, cache, info, lookahead)


def _name(directory: Path) -> str:
    return directory.resolve().name


def _schema(config: EngineConfig, target: Target, draft: Draft | None) -> Schema:
    groups = [*target.groups(config.page_size)]
    if draft is not None:
        groups.append(draft.group(config.page_size))
    return Schema(Identity(target.digest), config.page_size, tuple(groups))


def _device_pages(config: EngineConfig, schema: Schema, target: Target) -> int:
    if config.device_tokens is not None:
        return max(1, config.device_tokens // config.page_size)
    page_bytes = sum(group.page_bytes for group in schema.groups)
    if target.device.type == "cpu":
        return max(1, min(_CPU_POOL_BYTES // page_bytes, _CPU_POOL_TOKENS // config.page_size))
    import torch

    free, _ = torch.cuda.mem_get_info(target.device)
    return max(1, int(free * config.mem_fraction) // page_bytes)


def _context_length(config: EngineConfig, target: Target, pages: int, lookahead: int) -> int:
    """The longest sequence that the model and the device pool can hold."""
    pool = pages * config.page_size - lookahead
    wanted = config.context_length
    if wanted is None:
        wanted = min(target.context_length, pool)
    if wanted > target.context_length:
        raise ConfigError(
            f"a context of {wanted} tokens was asked for; the model was made for "
            f"{target.context_length}"
        )
    if wanted > pool or wanted < 2:
        raise ConfigError(
            f"a device pool of {pages} pages of {config.page_size} tokens does not hold a context "
            f"of {wanted} tokens and {lookahead} to look ahead; raise --max-total-tokens or lower "
            "--context-length"
        )
    return wanted


def _host_pages(config: EngineConfig, schema: Schema, device_pages: int) -> int:
    if config.host_bytes is None:
        return int(config.host_ratio * device_pages)
    return config.host_bytes // sum(group.record_bytes for group in schema.groups)
