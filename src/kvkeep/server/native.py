"""``POST /generate``, SGLang's native endpoint."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError

from ..engine.messages import Finished, TokenLogprobs
from ..schema import RequestError
from .answers import Replies, closed_events, data
from .fields import Tolerant
from .large import LargeBodies
from .limits import Many
from .logprobs import Spell
from .protocol import CompletionRequest, Name, StreamOptions, Tokens
from .service import Service, while_connected

MAX_TOKENS = 128
"""New tokens of a request that does not say how many, as in SGLang."""

RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""Sampling parameters whose names differ from OpenAI's."""


class NativeRequest(Tolerant):
    """Body of ``POST /generate``."""

    text: str | Many[str] | None = None
    input_ids: Tokens | Many[Tokens] | None = None
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1  # 0 or more: log-probabilities of the prompt's tokens, too
    top_logprobs_num: int = Field(default=0, ge=0)
    rid: Name | Many[Name] = Field(default_factory=list)
    priority: int | None = None
    extra_key: Name = ""
    cache_salt: Name = ""
    no_store: bool = False
    ttl: float | None = None

    def translated(self) -> CompletionRequest:
        """The same as a request for a completion.

        Raises:
            RequestError: it has a text and ids, or neither.
        """
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("text or input_ids must be given, and not both")
        given = {RENAMED.get(name, name): value for name, value in self.sampling_params.items()}
        same = ("stream", "rid", "priority", "extra_key", "cache_salt", "no_store", "ttl")
        given |= {name: getattr(self, name) for name in same}
        given["prompt"] = self.input_ids if self.text is None else self.text
        given["logprobs"] = self.top_logprobs_num if self.return_logprob else None
        try:
            return CompletionRequest.model_validate(given)
        except ValidationError as error:
            found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise RequestValidationError(found) from None


@dataclass(slots=True)
class Part:
    """One answer so far."""

    prompt: Sequence[int]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached: int = 0
    finished: Finished | None = None


class NativeAnswer:
    """The response to one request: an object, or a list of them for several prompts or choices."""

    def __init__(
        self, model: str, prompts: Sequence[Sequence[int]], spell: Spell, n: int = 1
    ) -> None:
        self.id = uuid.uuid4().hex
        self.ids = [f"{self.id}-{index}" for index in range(len(prompts))]
        self._parts = {name: Part(prompt) for name, prompt in zip(self.ids, prompts, strict=True)}
        self._began = time.perf_counter()

    async def whole(self, replies: Replies) -> bytes:
        """Collect all ``replies``; return the response as JSON."""
        async with aclosing(replies):
            async for reply in replies:
                self._add(reply)
        found = [self._report(name) for name in self.ids]
        return msgspec.json.encode(found if len(found) > 1 else found[0])

    def events(self, replies: Replies, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """Server-sent events, each with all that its answer has so far."""

        async def parts() -> AsyncGenerator[bytes, None]:
            async with aclosing(replies):
                async for reply in replies:
                    self._add(reply)
                    index = {"index": self.ids.index(reply.id)} if len(self.ids) > 1 else {}
                    yield data(self._report(reply.id) | index)

        return closed_events(parts())

    def _add(self, reply: Any) -> None:
        part = self._parts[reply.id]
        if isinstance(reply, Finished):
            part.finished = reply
            part.cached = sum(reply.usage.cached_tokens.values())
            return
        part.text += reply.text
        part.tokens += reply.tokens
        part.logprobs += reply.logprobs or []
        part.prompt_logprobs += reply.prompt_logprobs or []
        part.cached = sum(reply.cached.values()) if reply.cached else part.cached

    def _report(self, name: str) -> dict[str, Any]:
        part = self._parts[name]
        meta: dict[str, Any] = {
            "id": name,
            "finish_reason": None,
            "prompt_tokens": len(part.prompt),
            "completion_tokens": len(part.tokens),
            "cached_tokens": part.cached,
            "weight_version": "default",
        }
        if part.logprobs:
            meta["output_token_logprobs"] = _pairs(part.tokens, part.logprobs)
            meta["output_top_logprobs"] = [_top(one) for one in part.logprobs]
        if part.prompt_logprobs:
            known = [TokenLogprobs(None, []), *part.prompt_logprobs]
            meta["input_token_logprobs"] = _pairs(part.prompt, known)
            meta["input_top_logprobs"] = [_top(one) for one in known]
        if part.finished:
            usage = part.finished.usage
            meta["finish_reason"] = {"type": part.finished.reason, "length": len(part.tokens)}
            meta["e2e_latency"] = time.perf_counter() - self._began
            meta["spec_verify_ct"] = usage.verify_steps
            if usage.accept_length is not None:
                meta["spec_accept_length"] = usage.accept_length
        return {"text": part.text, "output_ids": part.tokens, "meta_info": meta}


def _pairs(tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> list[list[Any]]:
    return [[one.logprob, token, None] for token, one in zip(tokens, found, strict=True)]


def _top(one: TokenLogprobs) -> list[list[Any]] | None:
    return [[value, token, None] for token, value in one.top] or None


def routes(service: Service) -> APIRouter:
    """The endpoint, served by ``service``."""
    router = APIRouter(tags=["generate"], route_class=LargeBodies)

    @router.post("/generate")
    async def generate(body: NativeRequest, request: Request) -> Response:
        """Continue one or more prompts, as SGLang does."""
        said = body.translated()
        service.check(said)
        prompts = await while_connected(request, service.encoder.prompts(said.prompt))
        return await service.answer(
            request,
            said,
            NativeAnswer,
            prompts,
            MAX_TOKENS,
            prompt_logprobs=body.return_logprob and body.logprob_start_len >= 0,
        )

    return router
