"""``POST /tokenize`` and ``/detokenize``, as in vLLM and SGLang."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ..schema import RequestError
from .large import LargeBodies
from .protocol import DetokenizeRequest, TokenizeRequest
from .service import Service, while_connected


def routes(service: Service) -> APIRouter:
    """The endpoints, served by ``service``."""
    router = APIRouter(tags=["tokens"], route_class=LargeBodies)
    encoder, context = service.encoder, service.client.info.context_length

    @router.post("/v1/tokenize", include_in_schema=False)
    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """Tokens of a prompt or a chat; lists of them for several prompts."""
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt or messages must be given, and not both")
        special = body.add_special_tokens
        if body.messages is not None:
            variables = {"add_generation_prompt": body.add_generation_prompt}
            variables |= body.chat_template_kwargs
            work = encoder.chat(body.messages, variables, special=bool(special))
            tokens = (await while_connected(request, work)).tokens
            return {"count": len(tokens), "max_model_len": context, "tokens": tokens}
        several = await while_connected(
            request, encoder.prompts(body.prompt or "", special=special is not False)
        )
        if isinstance(body.prompt, list):
            counts = [len(tokens) for tokens in several]
            return {"count": counts, "max_model_len": context, "tokens": several}
        return {"count": len(several[0]), "max_model_len": context, "tokens": several[0]}

    @router.post("/v1/detokenize", include_in_schema=False)
    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
        """The text of tokens: ``prompt`` as in vLLM, ``text`` as in SGLang."""
        service.check_model(body.model)
        if body.tokens:
            encoder.checked(body.tokens)
        text = await while_connected(request, encoder.text(body.tokens, body.skip_special_tokens))
        return {"prompt": text, "text": text}

    return router
