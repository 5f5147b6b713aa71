"""What an engine is built from. Flag names on the command line follow SGLang's."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..core.policy import EVICTION, PREFETCH, RECOMPUTE, WRITE
from ..media.base import BACKENDS, LAYOUTS
from ..schema import ConfigError

GIB = 1 << 30


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one engine. Checked at construction.

    Raises:
        ConfigError: a value is out of range or two contradict each other.
    """

    model: Path  # local directory in Hugging Face layout
    draft: Path | None = None
    served_name: str | None = None  # None: the directory's name
    dtype: str = "auto"  # "auto", "float32", "bfloat16", "float16"; auto: float32 on a CPU
    kv_dtype: str = "auto"  # of keys and values: "auto" (the model's), "fp8_e4m3", "float16", ...
    device: str = "auto"  # "auto", "cpu", "cuda"
    context_length: int | None = None  # None: the model's, as far as the device pool holds it
    page_size: int = 64  # tokens
    device_tokens: int | None = None  # device pool; None: from mem_fraction / a CPU default
    mem_fraction: float = 0.8  # --mem-fraction-static: of free CUDA memory, for the device pool
    window_ratio: float = 0.8  # --swa-full-tokens-ratio: window slots per page of the pool
    state_slots: int | None = None  # --max-mamba-cache-size; None: three per running request
    snapshot_pages: int | None = None  # a snapshot of recurrent state every so many pages
    host_bytes: int | None = None  # --hicache-size; None: ratio x device pool
    host_ratio: float = 2.0  # --hicache-ratio
    memory_layout: str = "page_first"  # --hicache-mem-layout: one of media.base.LAYOUTS
    io_backend: str = "direct"  # --hicache-io-backend: one of media.base.BACKENDS
    storage_dir: Path | None = None  # None: no storage tier
    storage_bytes: int = 16 * GIB  # one quota over everything in storage_dir
    prefetch_policy: str = "wait_complete"  # one of policy.PREFETCH
    prefetch_min_tokens: int = 256  # a shorter part of a prompt is not read from storage
    prefetch_seconds: float = 1.0  # --prefetch-timeout-base: that timeout waits at most, ...
    prefetch_seconds_per_1k: float = 0.25  # ... and so much more per 1,000 tokens
    prefetch_share: float = 0.5  # of host memory that prefetches may hold
    recompute: str = "auto"  # one of policy.RECOMPUTE
    write_policy: str = "write_through"  # one of policy.WRITE
    write_hits: int = 2  # of a page, until write_through_selective takes it down
    write_ahead: float = 0.02  # of the device pool: what write_back keeps free
    eviction: str = "lru"  # a name in policy.EVICTION
    missing: str = "strict"  # "strict", "lenient"; "stale" is a measuring control, never safe
    chunked_prefill_size: int = 512  # tokens of prefill per step
    max_running: int = 64  # requests
    cuda_graphs: bool = True  # on CUDA, decoding is recorded; --disable-cuda-graph
    num_steps: int = 5  # draft steps per round
    num_draft_tokens: int | None = None  # tokens verified per round; None: num_steps + 1
    seed: int = 0  # for requests that bring none

    def __post_init__(self) -> None:
        choices = {
            "dtype": ("auto", "float32", "bfloat16", "float16"),
            "kv_dtype": ("auto", "float32", "bfloat16", "float16", "fp8_e4m3"),
            "device": ("auto", "cpu", "cuda"),
            "memory_layout": LAYOUTS,
            "io_backend": BACKENDS,
            "prefetch_policy": PREFETCH,
            "recompute": RECOMPUTE,
            "write_policy": WRITE,
            "eviction": tuple(EVICTION),
            "missing": ("strict", "lenient", "stale"),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        for name in ("page_size", "chunked_prefill_size", "max_running", "num_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_draft_tokens not in (None, self.num_steps + 1):
            raise ConfigError(
                f"num_draft_tokens must be num_steps + 1 = {self.num_steps + 1} for a chain, "
                f"not {self.num_draft_tokens}"
            )
