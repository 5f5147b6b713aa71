"""The OpenAI-compatible HTTP app."""

from __future__ import annotations

from fastapi import FastAPI

from ..engine.client import EngineClient
from . import admin, chat, completions, errors
from .config import ApiConfig
from .limits import BodyLimits
from .prompts import Encoder
from .service import Service
from .tokens import Tokenizer


def create_app(client: EngineClient, tokenizer: Tokenizer, api: ApiConfig | None = None) -> FastAPI:
    """Return an ASGI app that serves ``client``'s engine and encodes text with ``tokenizer``."""
    api = api or ApiConfig()
    app = FastAPI(title="kvkeep")
    app.add_middleware(BodyLimits, api)
    info = client.info
    encoder = Encoder(tokenizer, info.context_length, info.vocab_size, api.max_prompts)
    service = Service(client, encoder, api)
    for room in (completions, chat, admin):
        app.include_router(room.routes(service))
    errors.install(app)
    return app
