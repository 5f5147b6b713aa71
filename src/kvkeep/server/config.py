"""What a server is built from."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from .. import logs
from ..engine.config import EngineConfig
from ..schema import ConfigError
from ..settings import REQUESTS, SERVER, check, flag, setting
from .speech import ALIASES, REASONING
from .tool_formats import BY_NAME


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
    header_timeout: float = setting(
        10.0, REQUESTS, "Seconds that a client may take for a request's line and headers.", above=0
    )
    write_timeout: float = setting(
        30.0, REQUESTS, "Seconds without progress until a client that does not read its answer is "
        "cut off, and its requests aborted.", above=0,
    )  # fmt: skip
    keep_alive_timeout: float = setting(
        75.0, REQUESTS, "Seconds that a connection may wait for its next request.", above=0
    )
    max_connections: int = setting(
        4096, REQUESTS, "Connections at once. On further ones, all but probes is a 503.", least=1
    )
    max_prompts: int = setting(
        128, REQUESTS, "Prompts of one request.", "--max-prompts-per-request", least=1
    )
    max_stop_strings: int = setting(
        16, REQUESTS, "Stop strings of one request.", least=0, most=1024
    )

    api_key: str | None = setting(
        None, REQUESTS, "Key that requests must bring, as Authorization: Bearer KEY.", secret=True
    )
    admin_api_key: str | None = setting(
        None, REQUESTS, "Key for eviction, aborts and metrics. It opens all else, too.",
        secret=True,
    )  # fmt: skip

    sampling_defaults: str = setting(
        "model", REQUESTS, "Of requests that name none: as the model's generation_config.json "
        "says, or as OpenAI's, temperature and top_p 1.", choices=("model", "openai"),
    )  # fmt: skip
    chat_template: Path | None = setting(
        None, REQUESTS, "File with a Jinja chat template. Default: the model's own."
    )
    otlp_traces_endpoint: str | None = setting(
        None, REQUESTS, "URL for OpenTelemetry traces, by OTLP over HTTP. Needs the extra otel.",
    )  # fmt: skip

    tool_call_parser: str = setting(
        "auto", REQUESTS, "How the model writes tool calls; auto: as its chat template shows.",
        choices=("auto", "none", *BY_NAME),
    )  # fmt: skip
    reasoning_parser: str = setting(
        "auto", REQUESTS, "Tags around the model's reasoning; auto: those in its chat template.",
        choices=("auto", "none", *REASONING, *ALIASES),
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)
        for name in ("api_key", "admin_api_key"):
            key = getattr(self, name)
            if key is not None and not re.fullmatch(r"[!-~]+", key):
                raise ConfigError(f"{flag(name)} must be printable ASCII without spaces")
        if self.otlp_traces_endpoint is not None:
            _check_traces(self.otlp_traces_endpoint)


def _check_traces(endpoint: str) -> None:
    if not re.match(r"https?://[^/]", endpoint):
        raise ConfigError(
            "--otlp-traces-endpoint must be a URL such as http://127.0.0.1:4318/v1/traces, "
            f"not {endpoint!r}"
        )
    try:
        import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry, which is not installed: "
            f"pip install 'kvkeep[otel]' ({error})"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All settings of one server, those of its engine included.

    Raises:
        ConfigError: a value is not allowed.
    """

    ssl_certfile: Path | None = setting(
        None, SERVER, "File with the server's certificate and those up to its authority, in PEM. "
        "With it, the server speaks TLS.",
    )  # fmt: skip
    ssl_keyfile: Path | None = setting(
        None, SERVER, "File with the certificate's key, in PEM. Default: the certificate's file."
    )
    ssl_keyfile_password: str | None = setting(None, SERVER, "Password of the key.", secret=True)
    ssl_ca_certs: Path | None = setting(
        None, SERVER, "File with certificates of authorities, in PEM. With it, clients must show "
        "a certificate of one of them.",
    )  # fmt: skip
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

    log_format: str = setting(
        "text", SERVER, "How log lines look; json: an object per line.", choices=tuple(logs.FORMS)
    )
    enable_metrics: bool = setting(False, SERVER, "As in SGLang. /metrics is always there.")
    enable_hierarchical_cache: bool = setting(
        False, SERVER, "As in SGLang. The host tier is always there; --hicache-ratio sizes it."
    )

    api: ApiConfig = field(default_factory=ApiConfig)
    engine: EngineConfig

    def __post_init__(self) -> None:
        check(self)
