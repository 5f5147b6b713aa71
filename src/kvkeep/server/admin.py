"""Endpoints for operators: metrics, eviction and aborts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ..schema import KvkeepError, RequestError
from .protocol import AbortRequest, EvictRequest
from .service import Service

SCRAPE_SECONDS = 5.0  # less than the 10 s after which Prometheus gives up


def routes(service: Service) -> APIRouter:
    """The endpoints, served by ``service``."""
    router = APIRouter(tags=["admin"])
    client = service.client

    @router.get("/metrics")
    async def metrics() -> Response:
        """All metrics in the Prometheus text format; those of the engine only if it answers."""
        figures = None
        with contextlib.suppress(TimeoutError, KvkeepError):
            figures = await asyncio.wait_for(client.figures(), SCRAPE_SECONDS)
        text = service.metrics.render(figures, client.restarts)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.post("/kvkeep/evict")
    async def evict(body: EvictRequest) -> dict[str, Any]:
        """Evict every page that no request or transfer uses from a memory tier."""
        return {"tier": body.tier, "evicted": await client.evict(body.tier)}

    @router.get("/flush_cache", include_in_schema=False)
    @router.post("/flush_cache")
    async def flush_cache() -> dict[str, Any]:
        """Evict every page that no request or transfer uses from device and host, not storage."""
        evicted = {tier: await client.evict(tier) for tier in ("device", "host")}
        return {"success": True, "evicted": evicted}

    @router.post("/abort_request")
    async def abort_request(body: AbortRequest) -> dict[str, int]:
        """Abort the requests with this ``rid`` or response id, or all. They end as "abort"."""
        if not body.rid and not body.abort_all:
            raise RequestError("rid must name a request, or abort_all be true")
        return {"aborted": service.running.abort(None if body.abort_all else body.rid)}

    return router
