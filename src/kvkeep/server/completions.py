"""``POST /v1/completions``."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from .answers import COMPLETION, Answer, explanation
from .large import LargeBodies
from .protocol import CompletionRequest
from .service import Service, while_connected

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


def routes(service: Service) -> APIRouter:
    """The endpoint, served by ``service``."""
    router = APIRouter(tags=["generate"], route_class=LargeBodies)

    @router.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts, given as text or as token ids."""
        service.check(body)
        prompts = await while_connected(request, service.encoder.prompts(body.prompt))
        return await service.answer(
            request,
            body,
            partial(Answer, COMPLETION, tell=explanation if body.kvkeep.explain else None),
            prompts,
            DEFAULT_MAX_TOKENS,
            echo=body.echo,
            prompt_logprobs=body.echo and body.wanted_logprobs is not None,
        )

    return router
