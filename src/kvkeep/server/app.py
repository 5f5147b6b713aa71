"""The OpenAI-compatible HTTP app."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI

from .. import __version__
from ..engine.client import EngineClient
from ..engine.config import EngineConfig
from . import admin, anthropic, chat, completions, errors, explain, native, tokenize
from . import info as info_room
from .access import Keys, Requests
from .activity import Activity
from .config import ServerConfig
from .connections import Crowd
from .defaults import chat_template, sampling_defaults
from .dialects import Dialects
from .explain import Recent
from .limits import BodyLimits
from .metrics import Metrics
from .openapi import describe
from .prompts import Encoder
from .running import Running
from .service import Service
from .tokens import Tokenizer


def create_app(
    client: EngineClient, tokenizer: Tokenizer, config: ServerConfig | None = None
) -> FastAPI:
    """An ASGI app that serves ``client``'s engine and encodes text with ``tokenizer``.

    Args:
        config: None: the defaults.

    Raises:
        ConfigError: the model's sampling defaults or the chat template cannot be used.
    """
    info = client.info
    config = config or ServerConfig(engine=EngineConfig(model=Path(info.name)))
    api = config.api
    if api.chat_template:
        tokenizer.chat_template = chat_template(api.chat_template)
    defaults = {}
    if api.sampling_defaults == "model":
        defaults = sampling_defaults(config.engine.model)
    encoder = Encoder(tokenizer, info.context_length, info.vocab_size, api.max_prompts)
    recent = Recent()
    tracing = None
    if api.otlp_traces_endpoint:
        from .tracing import Tracing, exporting  # an extra

        tracing = Tracing(exporting(api.otlp_traces_endpoint), info.name)
    service = Service(client, encoder, api, Running(client), recent, Metrics(), defaults, tracing)
    activity = Activity(client, service.metrics.counts)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        reporting = asyncio.create_task(activity.report())
        yield
        reporting.cancel()

    app = FastAPI(title="kvkeep", version=__version__, lifespan=lifespan)
    app.state.metrics = service.metrics
    dialects = Dialects(tokenizer, api.tool_call_parser, api.reasoning_parser)
    routers = [room.routes(service) for room in (completions, native, tokenize, admin)]
    routers += [room.routes(service, dialects) for room in (chat, anthropic)]
    for router in (*routers, info_room.routes(service, config), explain.routes(recent)):
        app.include_router(router)
        service.metrics.expect(router.routes)
    errors.install(app)
    describe(app, info)
    app.add_middleware(BodyLimits, api)
    app.add_middleware(Keys, api)
    app.add_middleware(Crowd, api)
    app.add_middleware(Requests, service.metrics.responded)
    return app
