"""The OpenAI-compatible HTTP app."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI

from ..engine.client import EngineClient
from ..engine.config import EngineConfig
from . import admin, chat, completions, errors, tokenize
from . import info as info_room
from .config import ServerConfig
from .limits import BodyLimits
from .prompts import Encoder
from .running import Running
from .service import Service
from .tokens import Tokenizer


def create_app(
    client: EngineClient, tokenizer: Tokenizer, config: ServerConfig | None = None
) -> FastAPI:
    """An ASGI app that serves ``client``'s engine and encodes text with ``tokenizer``.

    Its ``state.ready`` says whether new requests are welcome; who runs it clears it to drain.

    Args:
        config: None: the defaults.
    """
    info = client.info
    config = config or ServerConfig(engine=EngineConfig(model=Path(info.name)))
    api = config.api
    app = FastAPI(title="kvkeep")
    app.state.ready = True
    app.add_middleware(BodyLimits, api)
    encoder = Encoder(tokenizer, info.context_length, info.vocab_size, api.max_prompts)
    service = Service(client, encoder, api, Running(client))
    for room in (completions, chat, tokenize, admin):
        app.include_router(room.routes(service))
    app.include_router(info_room.routes(service, config))
    errors.install(app)
    return app
