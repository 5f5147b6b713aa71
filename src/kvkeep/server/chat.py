"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from .answers import Answer, Tell, chat_shape, explanation
from .dialects import Dialects
from .large import LargeBodies
from .logprobs import Spell
from .protocol import ChatRequest
from .service import Service, while_connected
from .speech import Dialect
from .voice import ChatVoice


def routes(service: Service, dialects: Dialects) -> APIRouter:
    """The endpoint, served by ``service``."""
    router = APIRouter(tags=["generate"], route_class=LargeBodies)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, formatted with the model's chat template."""
        service.check(body)
        encoding = service.encoder.chat(body.messages, body.variables, tools=body.shown_tools)
        prompt = await while_connected(request, encoding)
        plan = dialects.plan(body, prompt.ending)
        tell = explanation if body.kvkeep.explain else None
        make = partial(_answer, plan.dialect, body.stream_reasoning, tell)
        return await service.answer(request, body, make, [prompt.tokens], sampling=plan.sampling)

    return router


def _answer(
    dialect: Dialect,
    stream_reasoning: bool,
    tell: Tell | None,
    model: str,
    prompts: Sequence[Sequence[int]],
    spell: Spell,
    n: int,
) -> Answer:
    voice = partial(ChatVoice, dialect, spell, stream_reasoning)
    return Answer(chat_shape(voice), model, prompts, spell, n, tell)
