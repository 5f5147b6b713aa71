"""A server on a thread, on an engine without a model: for what needs real connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fake_engine import FakeEngine, FakeTokenizer

from kvkeep.engine.client import EngineClient
from kvkeep.engine.config import EngineConfig
from kvkeep.server.app import create_app
from kvkeep.server.config import ApiConfig, ServerConfig
from kvkeep.server.run import of_uvicorn


@contextmanager
def serving(
    engine: FakeEngine, buffer: int | None = None, tls: dict[str, Any] | None = None, **api: Any
) -> Iterator[int]:
    """Serve ``engine``; yield the port.

    Args:
        buffer: bytes of answers that the kernel may keep.
        tls: settings of the server.
        api: settings of its API.
    """
    model = EngineConfig(model=Path("fake"))
    config = ServerConfig(engine=model, api=ApiConfig(**api), **(tls or {}))
    app = create_app(EngineClient(engine), FakeTokenizer(), config)
    server = uvicorn.Server(of_uvicorn(app, "critical", config))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()
