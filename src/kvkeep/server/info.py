"""Endpoints that say what this server is, and whether it is up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter

from .. import __version__
from ..schema import Closed, ModelNotFound
from ..settings import written
from .config import ServerConfig
from .service import Service

HEALTH_SECONDS = 20.0  # an engine that takes longer to answer is unhealthy


def routes(service: Service, config: ServerConfig) -> APIRouter:
    """The endpoints, served by ``service``, which was made from ``config``."""
    router = APIRouter(tags=["info"])
    info = service.client.info
    settings = written(config)
    card = {
        "id": info.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "kvkeep",
        "root": settings["model_path"],
        "max_model_len": info.context_length,
        "kvkeep": {"draft": info.draft, "page_tokens": info.page_tokens},
    }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model that this server serves."""
        return {"object": "list", "data": [card]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of this name."""
        if name != info.name:
            raise ModelNotFound(f"model {name!r} is not served here; {info.name!r} is")
        return card

    @router.get("/get_model_info", include_in_schema=False)
    @router.get("/model_info")
    async def model_info() -> dict[str, Any]:
        """The model, as SGLang describes it."""
        return {
            "model_path": settings["model_path"],
            "served_model_name": info.name,
            "tokenizer_path": settings["model_path"],
            "is_generation": True,
            "preferred_sampling_params": dict(service.defaults) or None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
        }

    @router.get("/get_server_info", include_in_schema=False)
    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """The settings by SGLang's names, and the mean accept length since the start."""
        state = {"avg_spec_accept_length": service.metrics.accept_length}
        return settings | {
            "served_model_name": info.name,
            "context_length": info.context_length,
            "max_total_num_tokens": max(info.pools.values(), default=0),
            "pools": info.pools,
            "version": __version__,
            "internal_states": [state],
        }

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of kvkeep."""
        return {"version": __version__}

    @router.head("/ping", include_in_schema=False)
    @router.get("/ping")
    async def ping() -> dict[str, str]:
        """200 while this process answers."""
        return {"status": "ok"}

    @router.head("/health", include_in_schema=False)
    @router.get("/health_generate", include_in_schema=False)
    @router.get("/health")
    async def health() -> dict[str, str]:
        """200 if the engine answers in time, 503 otherwise."""
        try:
            await asyncio.wait_for(service.client.figures(), HEALTH_SECONDS)
        except TimeoutError:
            raise Closed(f"the engine has not answered for {HEALTH_SECONDS:g} s") from None
        return {"status": "ok"}

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> dict[str, str]:
        """200 if new requests are welcome, 503 while the server drains."""
        if service.client.draining:
            raise Closed("the server is shutting down")
        return {"status": "ready"}

    return router
