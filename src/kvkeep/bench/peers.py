"""The caches of other projects, where they are installed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from . import calls, files
from .tree import Make


def indexes(sglang: Path | None, vllm: bool) -> dict[str, Make]:
    """What our tree and table are compared with, by name.

    Args:
        sglang: a directory to import SGLang from; None: without it.
        vllm: whether to compare with vLLM.

    Raises:
        ConfigError: one of them cannot be imported.
    """
    makes: dict[str, Make] = {}
    if sglang is not None:
        from .sglang import SGLang, add_peer

        add_peer(sglang)
        makes["SGLang, Rust"] = partial(SGLang, core="rust")
        makes["SGLang, Python"] = partial(SGLang, core="python")
    if vllm:
        from .vllm import VLLM, need_peer

        need_peer()
        makes["vLLM"] = VLLM
    return makes


def stores(sglang: Path | None) -> dict[str, files.Make]:
    """What our file store is compared with, by name. As :func:`indexes`."""
    if sglang is None:
        return {}
    from .sglang import SGLangFiles, add_peer

    add_peer(sglang)
    return {"SGLang": SGLangFiles}


def caches(sglang: Path | None) -> dict[str, calls.Make]:
    """What our cache's calls are compared with, by name. As :func:`indexes`."""
    if sglang is None:
        return {}
    from .sglang import SGLangCalls, add_peer

    add_peer(sglang)
    return {"SGLang, Rust": partial(SGLangCalls, core="rust")}
