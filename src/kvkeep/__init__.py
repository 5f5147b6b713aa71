"""kvkeep: a hierarchical KV cache for LLM serving that keeps the draft model's state too.

``Cache`` and what describes a page can be imported from here; ``kvkeep serve`` is a server on top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.cache import Cache
    from .core.lease import Lease, Prefetch
    from .core.pages import Retention
    from .core.policy import Policy
    from .schema import Component, Group, Identity, KvkeepError, Schema
    from .stores.file import FileStore

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "Component",
    "FileStore",
    "Group",
    "Identity",
    "KvkeepError",
    "Lease",
    "Policy",
    "Prefetch",
    "Retention",
    "Schema",
]

_HOME = {
    "Cache": "core.cache",
    "FileStore": "stores.file",
    "Lease": "core.lease",
    "Policy": "core.policy",
    "Prefetch": "core.lease",
    "Retention": "core.pages",
}  # all others are in schema


def __getattr__(name: str) -> Any:
    """Import on first use: ``import kvkeep`` alone does not import torch."""
    if name not in __all__:
        raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOME.get(name, 'schema')}", __name__), name)
