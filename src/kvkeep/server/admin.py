"""Endpoints for operators: models, health, metrics and eviction."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ..schema import Closed
from .protocol import EvictRequest
from .service import Service

HEALTH_SECONDS = 20.0  # an engine that takes longer to answer is unhealthy


def routes(service: Service) -> APIRouter:
    """The endpoints, served by ``service``."""
    router = APIRouter(tags=["admin"])
    info = service.client.info
    created = int(time.time())

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model that this server serves."""
        model = {
            "id": info.name,
            "object": "model",
            "created": created,
            "owned_by": "kvkeep",
            "max_model_len": info.context_length,
            "kvkeep": {"draft": info.draft, "page_tokens": info.page_tokens},
        }
        return {"object": "list", "data": [model]}

    @router.get("/health")
    async def health() -> dict[str, str]:
        """200 if the engine answers in time, 503 otherwise."""
        try:
            await asyncio.wait_for(service.client.figures(), HEALTH_SECONDS)
        except TimeoutError:
            raise Closed(f"the engine has not answered for {HEALTH_SECONDS:g} s") from None
        return {"status": "ok"}

    @router.get("/metrics")
    async def metrics() -> Response:
        """All metrics in the Prometheus text format."""
        text = service.metrics.render(await service.client.figures())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.post("/kvkeep/evict")
    async def evict(body: EvictRequest) -> dict[str, Any]:
        """Evict every page that no request or transfer uses from a memory tier."""
        return {"tier": body.tier, "evicted": await service.client.evict(body.tier)}

    return router
