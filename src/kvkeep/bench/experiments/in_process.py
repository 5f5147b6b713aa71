"""``kvkeep serve`` with the engine on a thread of the server's process: what a process of its own
is compared with. Takes the model's directory and ``--host``, ``--port``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...engine.config import EngineConfig
from ...engine.core import Engine
from ...server.config import ServerConfig
from ...server.run import bind, run


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    said = parser.parse_args()
    config = ServerConfig(engine=EngineConfig(model=said.model))
    with bind(said.host, said.port) as listener:
        run(Engine(config.engine), listener, config.log_level, 30.0, config)


if __name__ == "__main__":
    main()
