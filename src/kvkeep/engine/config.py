"""What an engine is built from. Flags on the command line are named as SGLang's."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..core.policy import Policy
from ..media.base import BACKENDS, LAYOUTS
from ..schema import ConfigError
from ..settings import MEMORY, SERVER, SPECULATION, STORAGE, check, described, setting
from ..stores.registry import backend
from .waiting import POLICIES

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of one engine.

    Raises:
        ConfigError: a value is not allowed, or two contradict each other.
    """

    model: Path = field(
        metadata=described(SERVER, "The model's directory, as MODEL.", "--model-path", "--model")
    )
    served_name: str | None = setting(
        None, SERVER, "Name in the API. Default: the directory's.", "--served-model-name"
    )
    seed: int = setting(
        0, SERVER, "Seed of requests that bring none.", "--random-seed", "--seed", least=0
    )

    dtype: str = setting(
        "auto", MEMORY, "Of weights and activations. auto: float32 on a CPU, else the model's.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )  # fmt: skip
    kv_dtype: str = setting(
        "auto", MEMORY, "Of cached keys and values. auto: the model's.", "--kv-cache-dtype",
        choices=("auto", "float32", "bfloat16", "float16", "fp8_e4m3"),
    )  # fmt: skip
    device: str = setting("auto", MEMORY, "Where models run.", choices=("auto", "cpu", "cuda"))
    context_length: int | None = setting(
        None, MEMORY, "Most tokens of prompt and answer. Default: the model's, as far as the "
        "device's pool holds it.", least=1,
    )  # fmt: skip
    device_tokens: int | None = setting(
        None, MEMORY, "Tokens that the device's KV pool holds.", "--max-total-tokens", least=1
    )
    mem_fraction: float = setting(
        0.8, MEMORY, "Without --max-total-tokens: part of free CUDA memory for the pool.",
        "--mem-fraction-static", above=0, most=1,
    )  # fmt: skip
    max_running: int = setting(
        64, MEMORY, "Requests that may be computed together.", "--max-running-requests", least=1
    )
    chunked_prefill_size: int = setting(
        512, MEMORY, "Prompt tokens per step: fewer let running requests wait less.", least=1
    )
    max_queued: int = setting(
        1024, SERVER, "Requests that may wait for a place; more are refused.",
        "--max-queued-requests", least=1,
    )  # fmt: skip
    schedule_policy: str = setting(
        "fcfs", SERVER, "Which waiting request runs next: the first to come; the one with the "
        "longest prefix match in any tier; or the one of the highest priority.",
        choices=POLICIES,
    )  # fmt: skip
    schedule_patience: float = setting(
        5.0, SERVER, "Seconds after which a waiting request goes first under any policy.", least=0
    )
    disable_cuda_graph: bool = setting(
        False, MEMORY, "On CUDA, launch each decoding step anew instead of replaying a graph."
    )
    page_size: int = setting(
        64, MEMORY, "Tokens per page: what is shared, moved and evicted as one.", least=1
    )
    window_ratio: float = setting(
        0.8, MEMORY, "Tokens of sliding-window layers per token of the pool.",
        "--swa-full-tokens-ratio", above=0,
    )  # fmt: skip
    state_slots: int | None = setting(
        None, MEMORY, "Recurrent states on the device, running and snapshots. Default: by "
        "--max-running-requests.", "--max-mamba-cache-size", least=1,
    )  # fmt: skip
    host_bytes: int | None = setting(
        None, MEMORY, "Host memory for cached pages in GiB. Default: by --hicache-ratio.",
        "--hicache-size", least=0, unit=GIB,
    )  # fmt: skip
    host_ratio: float = setting(
        2.0, MEMORY, "Host memory for cached pages, as a multiple of the device's pool.",
        "--hicache-ratio", least=0,
    )  # fmt: skip
    memory_layout: str = setting(
        "page_first", MEMORY, "Of host memory. page_first reads storage straight into pages.",
        "--hicache-mem-layout", "--memory-layout", choices=LAYOUTS,
    )  # fmt: skip
    io_backend: str = setting(
        "direct", MEMORY, "What copies between device and host: copies, or on CUDA one kernel.",
        "--hicache-io-backend", "--io-backend", choices=BACKENDS,
    )  # fmt: skip

    storage_backend: str | None = setting(
        None, STORAGE, "Where pages outlive the server: file, the name of a backend that an "
        "installed package brings, or module:object. Default: file, where there is a directory.",
        "--hicache-storage-backend",
    )  # fmt: skip
    storage_dir: Path | None = setting(
        None, STORAGE, "Directory of the storage backend. Servers may share one of the file "
        "backend.", "--hicache-storage-dir",
    )  # fmt: skip
    storage_bytes: int = setting(
        16 * GIB, STORAGE, "Quota in GiB over all that the directory holds.",
        "--hicache-storage-size", above=0, unit=GIB,
    )  # fmt: skip

    draft: Path | None = setting(
        None, SPECULATION, "Directory of the draft model. Its KV is cached beside the target's.",
        "--speculative-draft-model-path", "--draft",
    )  # fmt: skip
    algorithm: str | None = setting(
        None, SPECULATION, "As in SGLang. The draft's own config says what it is.",
        "--speculative-algorithm", choices=("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"),
    )  # fmt: skip
    num_steps: int = setting(
        5, SPECULATION, "Tokens that the draft proposes per round.",
        "--speculative-num-steps", least=1,
    )  # fmt: skip
    num_draft_tokens: int | None = setting(
        None, SPECULATION, "Tokens verified per round: the steps and one more.",
        "--speculative-num-draft-tokens",
    )  # fmt: skip
    topk: int = setting(
        1, SPECULATION, "Must be 1: drafts are chains.", "--speculative-eagle-topk", least=1, most=1
    )

    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        check(self)
        if self.num_draft_tokens not in (None, self.num_steps + 1):
            raise ConfigError(
                "--speculative-num-draft-tokens must be --speculative-num-steps + 1 = "
                f"{self.num_steps + 1}, not {self.num_draft_tokens}: drafts are chains"
            )
        if self.algorithm and not self.draft:
            raise ConfigError(f"--speculative-algorithm {self.algorithm} needs --draft")
        if self.storage_backend:
            backend(self.storage_backend)
            if not self.storage_dir:
                raise ConfigError(
                    f"--hicache-storage-backend {self.storage_backend} needs --hicache-storage-dir"
                )
