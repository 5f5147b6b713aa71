"""What a server is built from."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine.config import EngineConfig
from ..settings import REQUESTS, SERVER, check, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """What the HTTP API allows.

    Raises:
        ConfigError: a value is not allowed.
    """

    max_body_bytes: int = setting(
        32 << 20, REQUESTS, "Bytes of a request's body. A larger one is a 413.", least=1
    )
    body_timeout: float = setting(
        30.0, REQUESTS, "Seconds that a client may take for the next part of a request's body.",
        above=0,
    )  # fmt: skip
    max_prompts: int = setting(
        128, REQUESTS, "Prompts of one request.", "--max-prompts-per-request", least=1
    )
    max_stop_strings: int = setting(16, REQUESTS, "Stop strings of one request.", least=0)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of one server, those of its engine included.

    Raises:
        ConfigError: a value is not allowed.
    """

    host: str = setting("127.0.0.1", SERVER, "Address to listen on; 0.0.0.0 is all.")
    port: int = setting(
        30000, SERVER, "Port to listen on; 0 finds a free one.", least=0, below=65536
    )
    log_level: str = setting(
        "warning", SERVER, "How much to log to stderr.",
        choices=("debug", "info", "warning", "error"),
    )  # fmt: skip
    enable_cache_report: bool = setting(
        False, SERVER, "As in SGLang. Answers always report cached tokens."
    )
    shutdown_grace_seconds: float = setting(
        30.0, SERVER, "From SIGTERM to the end. Running requests have three quarters of it to "
        "finish, then storage gets what it lacks.", least=0,
    )  # fmt: skip

    api: ApiConfig = field(default_factory=ApiConfig)
    engine: EngineConfig

    def __post_init__(self) -> None:
        check(self)
