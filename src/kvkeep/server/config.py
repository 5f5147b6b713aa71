"""What a server is built from."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.config import EngineConfig
from ..settings import SERVER, check, setting


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

    engine: EngineConfig

    def __post_init__(self) -> None:
        check(self)
