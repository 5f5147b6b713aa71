"""A whole server: a port, an engine behind it, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import time
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from .. import logs
from ..engine.client import EngineClient, EngineLink
from ..engine.link import RemoteEngine
from ..schema import ConfigError, KvkeepError
from .app import create_app
from .config import ApiConfig, ServerConfig
from .connections import allow_files, options
from .defaults import chat_template
from .tls import tls_context

REQUESTS_SHARE = 0.75
"""The part of the grace in which running requests may finish; storage has the rest."""

_FLUSH_SECONDS = 0.5  # after it, clients that do not read their answers are cut off


class ServedEngine(EngineLink, Protocol):
    """What a server needs of the engine that it starts and ends."""

    @property
    def lost(self) -> KvkeepError | None:
        """Why the engine is gone for good; None: it is not."""

    def start(self) -> None: ...

    def close(self, timeout: float) -> None:
        """Fail what still runs and write what storage lacks, within ``timeout`` seconds.

        May be called again after a signal handler interrupted it.
        """


def serve(config: ServerConfig) -> None:
    """Load the model that ``config`` names and serve it until SIGINT or SIGTERM.

    Raises:
        ConfigError: the port is taken, a model directory is none, or a model is not supported.
        EngineDied: the engine's process died too often.
    """
    model, draft = config.engine.model, config.engine.draft
    for directory in (model, draft):
        if directory and not (directory / "config.json").is_file():
            raise ConfigError(
                f"{directory} is no model directory: it should hold a config.json, "
                "weights in safetensors and a tokenizer.json"
            )
    logs.configure(logs.Choice(config.log_level.upper(), config.log_format))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if config.api.chat_template:
        chat_template(config.api.chat_template)  # before anything that takes long
    if files := allow_files(config.api.max_connections):
        say(f"the system allows {files} open files, too few for --max-connections")
    tls_context(config)  # before anything that takes long
    with bind(config.host, config.port) as listener:  # before anything that takes long
        say(f"loading {_names(model, draft)}")
        grace = config.shutdown_grace_seconds
        engine = RemoteEngine(config.engine, lambda: _tokenizer(model), grace)
        run(engine, listener, config.log_level, grace, config)


def _tokenizer(model: Path) -> Any:
    from ..models.tokenizer import load_tokenizer, without_torch

    without_torch()
    return load_tokenizer(model)


def run(
    engine: ServedEngine,
    listener: socket.socket,
    log_level: str,
    grace: float,
    config: ServerConfig | None = None,
) -> None:
    """Serve ``engine`` on ``listener`` until SIGINT or SIGTERM, then close it.

    After the signal, new requests are refused. Running ones have ``REQUESTS_SHARE`` of ``grace``
    seconds to finish, then they fail; storage has what is left. A second signal ends at once.

    Raises:
        EngineDied: the engine is lost.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    left = grace
    try:
        client = EngineClient(engine)
        app = create_app(client, engine.tokenizer, config)
        engine.start()
        server = _Server(of_uvicorn(app, log_level, config), engine, client, grace)
        server.run([listener])
        left = server.left
    finally:
        say("stopping: what storage has not got yet is written")
        try:
            engine.close(left)
        except KeyboardInterrupt:  # a second signal
            engine.close(0.0)
    if engine.lost:
        raise engine.lost


def of_uvicorn(app: FastAPI, log_level: str, config: ServerConfig | None) -> uvicorn.Config:
    """How uvicorn serves ``app``: with our connections, and TLS if ``config`` wants it.

    Raises:
        ConfigError: certificate or key cannot be used.
    """
    api = config.api if config else ApiConfig()
    made = uvicorn.Config(app, log_level=log_level, **options(api, app.state.metrics))
    made.load()
    made.ssl = tls_context(config) if config else None
    return made


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
    """Says so when it is ready; ends as :func:`run` says."""

    def __init__(
        self, config: uvicorn.Config, engine: ServedEngine, client: EngineClient, grace: float
    ) -> None:
        super().__init__(config)
        self._engine, self._client = engine, client
        self._grace = grace
        self._end: float | None = None  # monotonic time; None: nobody wants an end

    @property
    def left(self) -> float:
        """Seconds until everything should have ended."""
        return self._grace if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def _patience(self) -> float:
        """Seconds that running requests still have."""
        return self.left - (1 - REQUESTS_SHARE) * self._grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the grace, the second one ends it."""
        self._end = time.monotonic() + (self._grace if self._end is None else 0.0)
        self._client.drain()

    async def on_tick(self, counter: int) -> bool:
        drained = self._client.draining and not (self._client.busy and self._patience > 0)
        if drained or self._engine.lost:
            self._client.cut_off()
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        hanging_up = asyncio.create_task(self._hang_up())
        await super().shutdown(sockets)
        hanging_up.cancel()

    async def _hang_up(self) -> None:
        """Cut off clients that have not read their answers when the time of requests is over."""
        while self._patience > 0 and not self._engine.lost:
            await asyncio.sleep(0.1)
        await asyncio.sleep(_FLUSH_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(_FLUSH_SECONDS)
        self.force_exit = True  # a request that does not notice must not hold up the end

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
            scheme = "https" if self.config.ssl else "http"
            say(f"ready: {scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1")


def say(line: str) -> None:
    """Tell whoever started the server."""
    logs.say(line)


def _names(model: Path | str, draft: Path | str | None) -> str:
    return f"{model} with draft {draft}" if draft else f"{model} without a draft"
