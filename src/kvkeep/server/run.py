"""A whole server: a port, an engine behind it, and an orderly end."""

from __future__ import annotations

import contextlib
import errno
import gc
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Protocol

import uvicorn

from ..engine.client import EngineClient, EngineLink
from ..schema import ConfigError
from .access import configure_logging
from .app import create_app
from .config import ServerConfig
from .defaults import chat_template
from .limits import HEADERS
from .tokens import Tokenizer

GRACE_SECONDS = 30
"""How long running requests may take to finish once the server was told to stop."""


class ServedEngine(EngineLink, Protocol):
    """What a server needs of the engine that it starts and ends."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def start(self) -> None: ...

    def close(self) -> None:
        """Fail what still runs, write what storage has not got yet, and end the thread."""


def serve(config: ServerConfig) -> None:
    """Load the model that ``config`` names and serve it until SIGINT or SIGTERM.

    Raises:
        ConfigError: the port is taken, a model directory is none, or a model is not supported.
    """
    model, draft = config.engine.model, config.engine.draft
    for directory in (model, draft):
        if directory and not (directory / "config.json").is_file():
            raise ConfigError(
                f"{directory} is no model directory: it should hold a config.json, "
                "weights in safetensors and a tokenizer.json"
            )
    if config.api.chat_template:
        chat_template(config.api.chat_template)  # before anything that takes long
    with bind(config.host, config.port) as listener:  # before anything that takes long
        say(f"loading {_names(model, draft)}")
        from ..engine.core import Engine

        engine = Engine(config.engine)
        gc.collect()
        gc.freeze()  # so that no collection in the midst of a hit scans all that was loaded
        try:
            run(engine, listener, config.log_level, config=config)
        finally:
            gc.unfreeze()  # Python collects at exit; what it skips, Triton's library calls leaked


def run(
    engine: ServedEngine,
    listener: socket.socket,
    log_level: str,
    grace: int = GRACE_SECONDS,
    config: ServerConfig | None = None,
) -> None:
    """Serve ``engine`` on ``listener`` until SIGINT or SIGTERM, then close it."""
    configure_logging(log_level)
    # uvicorn ends gracefully on both, then raises what it got once more.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app = create_app(EngineClient(engine), engine.tokenizer, config)
        engine.start()
        options: dict[str, Any] = {
            "timeout_graceful_shutdown": grace,
            "access_log": False,
            **HEADERS,
        }
        with contextlib.suppress(KeyboardInterrupt):
            _Server(uvicorn.Config(app, log_level=log_level, **options), engine).run([listener])
    finally:
        say("stopping: what storage has not got yet is written")
        engine.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the address and refuses connections until it listens.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as on_error:
            listener = on_error.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            on_error.pop_all()
            return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is taken; --port chooses another") from None
        raise ConfigError(f"cannot listen on port {port} of {host}: {error.strerror}") from None


class _Server(uvicorn.Server):
    """Says so when it is ready."""

    def __init__(self, config: uvicorn.Config, engine: EngineLink) -> None:
        super().__init__(config)
        self._engine = engine

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        info = self._engine.info
        say(
            f"serving {_names(info.name, info.draft)}: "
            f"context of {info.context_length} tokens, pages of {info.page_tokens}, pools of "
            + ", ".join(f"{size} ({pool})" for pool, size in info.pools.items())
        )
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            say(f"ready: http://{f'[{host}]' if ':' in host else host}:{port}/v1")


def say(line: str) -> None:
    """Tell whoever started the server."""
    print(f"kvkeep: {line}", file=sys.stderr, flush=True)


def _names(model: Path | str, draft: Path | str | None) -> str:
    return f"{model} with draft {draft}" if draft else f"{model} without a draft"
