"""The path from a validated HTTP request to its response, shared by all generating endpoints."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine.client import EngineClient, Piece
from ..engine.messages import Finished, Generate, TokenLogprobs
from ..schema import ModelNotFound, PromptTooLong
from .answers import Replies
from .config import ApiConfig
from .explain import Recent
from .limits import check_count, check_names, check_stop
from .logprobs import Spell
from .metrics import Metrics
from .prompts import Encoder
from .protocol import GenerationRequest, StreamOptions
from .running import Running

if TYPE_CHECKING:
    from .tracing import Tracing

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Building(Protocol):
    """Builds the response to one request from the engine's replies."""

    id: str  # of the response
    ids: list[str]  # of its requests to the engine

    async def whole(self, replies: Replies) -> bytes:
        """Collect all ``replies``; return the response as JSON."""
        ...

    def events(self, replies: Replies, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events."""
        ...


class MakeAnswer(Protocol):
    """Makes a :class:`Building`."""

    def __call__(
        self, model: str, prompts: Sequence[Sequence[int]], spell: Spell, n: int
    ) -> Building:
        """``spell``: the text of one token alone; ``n``: choices per prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints of one app share."""

    client: EngineClient
    encoder: Encoder
    api: ApiConfig
    running: Running
    recent: Recent
    metrics: Metrics
    defaults: Mapping[str, Any]  # sampling parameters of requests that name none
    tracing: Tracing | None  # None: nobody collects traces

    def check(self, body: GenerationRequest) -> None:
        """Check what needs neither tokens nor the engine.

        Raises:
            ModelNotFound: ``body`` names a model that is not served here.
            RequestError: it has too many stop strings, or one that is too long; or too many names.
        """
        self.check_model(body.model)
        check_stop(body.stops, self.api.max_stop_strings)
        check_names(body.rids, self.api.max_prompts)

    def check_model(self, name: str | None) -> None:
        """Raises :class:`ModelNotFound` unless ``name`` is served here."""
        if name not in (None, self.client.info.name):
            raise ModelNotFound(f"model {name!r} is not served here; {self.client.info.name!r} is")

    async def answer(
        self,
        request: Request,
        body: GenerationRequest,
        make: MakeAnswer,
        prompts: list[list[int]],
        default_limit: int | None = None,
        echo: bool = False,
        prompt_logprobs: bool = False,
        sampling: Mapping[str, Any] | None = None,
    ) -> Response:
        """Generate from ``prompts`` and respond, whole or streamed as ``body`` asks.

        Args:
            make: builds the response.
            prompts: token ids of each prompt.
            default_limit: maximum of new tokens if ``body`` sets none; None: up to the context.
            echo: begin each answer with its prompt.
            prompt_logprobs: report those of the prompt's tokens too.
            sampling: parameters in place of those of ``body``.

        Raises:
            PromptTooLong: a prompt and its new tokens exceed the context.
            RequestError: a sampling parameter is out of range.
            ClientDisconnect: the client disconnected; its requests were aborted.
        """
        check_count(prompts * body.n, self.api.max_prompts)
        prompts = [tokens for tokens in prompts for _ in range(body.n)]
        answer = make(self.client.info.name, prompts, self.encoder.texts.spell, body.n)
        generates = [
            Generate(
                id=name,
                tokens=tokens,
                sampling=msgspec.structs.replace(
                    body.sampling(
                        self._limit(body, len(tokens), default_limit),
                        self.defaults,
                        index % body.n,
                    ),
                    **(sampling or {}),
                ),
                namespace=body.namespace,
                priority=body.priority,
                ttl=body.ttl,
                deadline_seconds=body.kvkeep.deadline_seconds,
                prompt_logprobs=prompt_logprobs,
                no_store=body.no_store,
                speculate=body.kvkeep.speculate,
                report_proposals=body.kvkeep.report_proposals,
            )
            for index, (name, tokens) in enumerate(zip(answer.ids, prompts, strict=True))
        ]
        endpoint = request.url.path
        names = [answer.id, request.state.request_id, *body.rids]
        replies = self.client.generate(*generates)
        replies = self.running.track(names, generates, replies)
        replies = self.recent.watch(names, self.metrics.watch(endpoint, replies))
        if self.tracing:
            replies = self.tracing.watch(request, answer.id, replies)
        if echo:
            replies = self._echoed(generates, replies)
        headers = _ignored(body.unknown)
        if not body.stream:
            whole = await while_connected(request, answer.whole(replies))
            return Response(whole, headers=headers, media_type="application/json")
        # Wait for the first reply: a request that fails before it gets an HTTP error status.
        first = await while_connected(request, _next(replies))
        return EventStream(
            answer.events(_after(first, replies), body.stream_options),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache"} | headers,
        )

    async def _echoed(self, generates: list[Generate], replies: Replies) -> Replies:
        """``replies``, the first to each request after its prompt."""
        prompts = {one.id: one.tokens for one in generates}
        async with aclosing(replies):
            async for reply in replies:
                if isinstance(reply, Piece) and (prompt := prompts.pop(reply.id, None)):
                    found = reply.logprobs
                    if found is not None:
                        first = TokenLogprobs(None, [])
                        found = [first, *(reply.prompt_logprobs or ()), *found]
                    yield msgspec.structs.replace(
                        reply,
                        tokens=prompt + reply.tokens,
                        text=self.encoder.texts.decode(prompt, skip_special=True) + reply.text,
                        logprobs=found,
                    )
                else:
                    yield reply

    def _limit(self, body: GenerationRequest, prompt: int, default: int | None) -> int:
        """Maximum number of new tokens for a prompt of ``prompt`` tokens."""
        context = self.client.info.context_length
        room = context - prompt
        if room < 1:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens and needs room for at least one more; "
                f"this model's maximum context length is {context} tokens"
            )
        if body.limit is None:
            return room if default is None else min(default, room)
        if body.limit > room:
            raise PromptTooLong(
                f"the prompt has {prompt} tokens and the request asks for {body.limit} more; "
                f"this model's maximum context length is {context} tokens"
            )
        return body.limit


def _ignored(names: list[str]) -> dict[str, str]:
    """A header that lists fields of the request that had no effect: it reveals a misspelt one."""
    shown = [name for name in names if re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII)][:16]
    if not shown:
        return {}
    logger.debug("ignored fields of a request: %s", ", ".join(shown))
    return {"x-kvkeep-ignored": ", ".join(shown)}


class EventStream(StreamingResponse):
    """A streaming response that closes its iterator, also if the client disconnects."""

    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``; cancel it if the client disconnects first.

    Raises:
        ClientDisconnect: the client disconnected first.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next(replies: Replies) -> Piece | Finished:
    return await anext(replies)


async def _after(first: Piece | Finished, replies: Replies) -> Replies:
    """``first``, then the rest of ``replies``."""
    async with aclosing(replies):
        yield first
        async for reply in replies:
            yield reply
