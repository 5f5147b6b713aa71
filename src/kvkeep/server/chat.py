"""``POST /v1/chat/completions``."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from .answers import CHAT, Answer, explanation
from .protocol import ChatRequest
from .service import Service, while_connected


def routes(service: Service) -> APIRouter:
    """The endpoint, served by ``service``."""
    router = APIRouter(tags=["generate"])

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, formatted with the model's chat template."""
        service.check(body)
        prompt = await while_connected(request, service.encoder.chat(body.messages, body.variables))
        return await service.answer(
            request,
            body,
            partial(Answer, CHAT, tell=explanation if body.kvkeep.explain else None),
            [prompt],
        )

    return router
