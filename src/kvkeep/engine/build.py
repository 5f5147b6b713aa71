"""An engine's parts, from its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.cache import Cache
from ..media.memory import Memory
from ..models.drafts.interface import Draft
from ..models.drafts.loading import load_draft
from ..models.graphs import Graphs
from ..models.target.hf import load_target
from ..models.target.model import Target
from ..models.tokenizer import load_tokenizer
from ..schema import Group, Identity, Schema
from ..stores.base import Store
from ..stores.labels import Label
from ..stores.registry import backend
from .config import EngineConfig
from .messages import ModelInfo
from .runner import Runner
from .sizing import context_length, device_slots, host_slots


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
        ConfigError: the backend cannot be opened.
    """
    if config.storage_dir is None:
        return None
    sizes = {schema.fingerprint(group): group.record_bytes for group in schema.groups}
    labels = {
        schema.fingerprint(group): Label(_served(config, group), group.name, schema.page_tokens)
        for group in schema.groups
    }
    open_backend = backend(config.storage_backend or "file")
    return open_backend(config.storage_dir, sizes, config.storage_bytes, labels)


OpenStore = Callable[[EngineConfig, Schema], Store | None]
"""What makes an engine's storage tier, such as :func:`open_store`."""


def build(config: EngineConfig, store: OpenStore = open_store) -> Parts:
    """Load the models, size the pools and open the storage tier.

    Raises:
        ConfigError: something does not fit; the message says what.
    """
    target = load_target(config.model, config.dtype, config.device, config.kv_dtype)
    if not config.disable_cuda_graph and target.device.type == "cuda":
        target.graphs = Graphs()
    tokenizer = load_tokenizer(config.model)
    draft = load_draft(config.draft, target) if config.draft else None
    schema = _schema(config, target, draft)
    lookahead = config.num_steps + 1 if draft else 1
    device = device_slots(config, schema, target.device, lookahead)
    host = host_slots(config, schema, device)
    context = context_length(config, schema, device, target.context_length, lookahead)
    memory = Memory(
        schema, device, host, str(target.device), config.memory_layout, config.io_backend
    )
    cache = Cache(schema, device, host, store(config, schema), config.policy, memory)
    runner = Runner(target, draft, memory.pools, config.page_size, config.num_steps)
    info = ModelInfo(
        name=_served(config),
        context_length=context,
        vocab_size=target.vocab_size,
        page_tokens=config.page_size,
        draft=_name(config.draft) if config.draft else None,
        pools={
            f"{group.name} on {tier}": slots[g] * (1 if group.working else config.page_size)
            for tier, slots in (("device", device), ("host", host))
            for g, group in enumerate(schema.groups)
        },
    )
    return Parts(target, tokenizer, runner, cache, info, lookahead)


def _served(config: EngineConfig, group: Group | None = None) -> str:
    """The model's name in the API; for a group of the draft's state, the draft's name, too."""
    name = config.served_name or _name(config.model)
    return f"{name} + {_name(config.draft)}" if group and group.source and config.draft else name


def _name(directory: Path) -> str:
    return directory.resolve().name


def _schema(config: EngineConfig, target: Target, draft: Draft | None) -> Schema:
    groups = [*target.groups(config.page_size)]
    if draft is not None:
        groups += draft.groups(config.page_size)
    return Schema(Identity(target.digest), config.page_size, tuple(groups))
