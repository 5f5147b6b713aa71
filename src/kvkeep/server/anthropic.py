"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, as in Anthropic's API."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..engine.messages import Finished
from ..schema import KvkeepError
from .answers import Replies
from .dialects import Dialects
from .errors import describe, in_anthropics_schema
from .fields import Tolerant
from .large import LargeBodies
from .limits import MOST_MESSAGES, Many
from .logprobs import Spell
from .protocol import ChatRequest, Name, StreamOptions, TextPart
from .service import Service, while_connected
from .speech import Dialect, Part
from .tools import MOST_TOOLS, ToolName
from .voice import Said

logger = logging.getLogger(__name__)

_LOOSE = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore")

Texts = str | Many[TextPart]


class Block(BaseModel):
    """A block of a message; each type has fields of its own."""

    model_config = _LOOSE

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    thinking: str = ""
    id: str = ""  # of a tool_use
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""  # of a tool_result
    content: Texts = ""


class Turn(BaseModel):
    """A message."""

    model_config = _LOOSE

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]

    def translated(self) -> list[dict[str, Any]]:
        """The same as messages of OpenAI's: results of tools are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        text, thoughts, calls, results = "", "", [], []
        for block in self.content:
            match block.type:
                case "text":
                    text += block.text
                case "thinking":
                    thoughts += block.thinking
                case "tool_use":
                    function = {"name": block.name, "arguments": block.input}
                    calls.append({"id": block.id, "type": "function", "function": function})
                case "tool_result":
                    said = _blocks(block.content)
                    results.append(
                        {"role": "tool", "tool_call_id": block.tool_use_id, "content": said}
                    )
        message: dict[str, Any] = {"role": self.role, "content": text}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        message |= {"tool_calls": calls} if calls else {}
        return results + ([message] if text or calls or not results else [])


class UsableTool(BaseModel):
    """A tool of the client's. Those of Anthropic's servers have other types."""

    model_config = _LOOSE

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    def translated(self) -> dict[str, Any]:
        """The same as a tool of OpenAI's."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        more = {"description": self.description, "strict": self.strict}
        function |= {name: value for name, value in more.items() if value is not None}
        return {"type": "function", "function": function}


class Choice(BaseModel):
    """Whether the model must call a tool."""

    model_config = _LOOSE

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False


class CountRequest(Tolerant):
    """Body of ``POST /v1/messages/count_tokens``. Fields of chats that are not here are theirs."""

    model: Name | None = None  # None: the served model
    messages: Many[Turn] = Field(max_length=MOST_MESSAGES)
    system: Texts = ""
    tools: Many[UsableTool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Choice = Choice(type="auto")
    thinking: dict[str, Any] | None = None  # no effect: the template says whether a model thinks
    stop_sequences: Many[str] = Field(default_factory=list)
    stream: bool = False
    n: Literal[1] = 1  # a message is one answer

    def translated(self) -> ChatRequest:
        """The same as a chat."""
        system = _blocks(self.system)
        given = dict(self.model_extra or {})
        given["messages"] = [{"role": "system", "content": system}] if system else []
        given["messages"] += [one for turn in self.messages for one in turn.translated()]
        given |= {"model": self.model, "stream": self.stream}
        given["stop"] = self.stop_sequences or given.get("stop")
        given["tools"] = [tool.translated() for tool in self.tools]
        choice = self.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        kinds: dict[str, Any] = {"any": "required", "tool": named}
        given["tool_choice"] = kinds.get(choice.type, choice.type)
        given["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        try:
            return ChatRequest.model_validate(given)
        except ValidationError as error:
            found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise RequestValidationError(found) from None


class MessagesRequest(CountRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: int

    def translated(self) -> ChatRequest:
        return super().translated().model_copy(update={"max_tokens": self.max_tokens})


def _blocks(texts: Texts) -> str:
    return texts if isinstance(texts, str) else "".join(part.text for part in texts)


class MessageAnswer:
    """The response to one request."""

    def __init__(
        self,
        dialect: Dialect,
        model: str,
        prompts: Sequence[Sequence[int]],
        spell: Spell,
        n: int = 1,
    ) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self.ids = [f"{self.id}-{index}" for index in range(len(prompts))]
        self._model, self._prompt = model, len(prompts[0])
        self._said = Said(dialect, spell)
        self._cached = self._tokens = self._blocks = 0
        self._open: str | None = None  # the type of the block that is being sent

    async def whole(self, replies: Replies) -> bytes:
        """Collect all ``replies``; return the response as JSON."""
        reason = ""
        async with aclosing(replies):
            async for reply in replies:
                if isinstance(reply, Finished):
                    reason = self._ended(reply)
                    self._said.finish()
                else:
                    self._said.push(reply.text, reply.tokens)
        said = self._said
        blocks: list[dict[str, Any]] = []
        if thoughts := "".join(said.reasoning):
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if text := "".join(said.content):
            blocks.append({"type": "text", "text": text})
        for call in said.calls:
            given = msgspec.Raw("".join(call.arguments).encode())  # JSON that is sent as it is
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return msgspec.json.encode(self._message(blocks, self._reason(reason)))

    async def events(self, replies: Replies, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events; an error event if it fails."""
        begun = False
        try:
            async with aclosing(replies):
                async for reply in replies:
                    if not begun:
                        hit = None if isinstance(reply, Finished) else reply.cached
                        self._cached = sum((hit or {}).values())
                        yield _event("message_start", message=self._message([], None))
                        begun = True
                    if isinstance(reply, Finished):
                        reason = self._ended(reply)
                        for event in self._sent(self._said.finish()) + self._close():
                            yield event
                        delta = {"stop_reason": self._reason(reason), "stop_sequence": None}
                        yield _event("message_delta", delta=delta, usage=self._usage())
                        yield _event("message_stop")
                    else:
                        self._tokens += len(reply.tokens)
                        for event in self._sent(self._said.push(reply.text, reply.tokens)):
                            yield event
        except Exception as error:
            if not isinstance(error, KvkeepError):
                logger.exception("a streamed response failed")
            yield _event(**in_anthropics_schema(*describe(error)))

    def _ended(self, reply: Finished) -> str:
        self._tokens = reply.usage.completion_tokens
        self._cached = sum(reply.usage.cached_tokens.values())
        return reply.reason

    def _reason(self, engine: str) -> str:
        reason = self._said.reason(engine)
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(reason, "end_turn")

    def _message(self, blocks: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        ended = {"stop_reason": reason, "stop_sequence": None}
        return message | {"content": blocks} | ended | {"usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        return {
            "input_tokens": self._prompt - self._cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached,
            "output_tokens": self._tokens,
        }

    def _sent(self, parts: list[Part]) -> list[bytes]:
        events: list[bytes] = []
        for part in parts:
            match part.kind:
                case "content":
                    events += self._start("text", text="")
                    events += self._delta("text_delta", text=part.text)
                case "reasoning":
                    events += self._start("thinking", thinking="", signature="")
                    events += self._delta("thinking_delta", thinking=part.text)
                case "name":
                    events += self._close()
                    call = self._said.begun[part.call]
                    events += self._start("tool_use", id=call.id, name=call.name, input={})
                case "arguments":
                    events += self._delta("input_json_delta", partial_json=part.text)
        return events

    def _start(self, kind: str, **fields: Any) -> list[bytes]:
        """Begin a block, unless one of its kind is being sent."""
        if self._open == kind:
            return []
        events, self._open = self._close(), kind
        block = {"type": kind} | fields
        return [*events, _event("content_block_start", index=self._blocks, content_block=block)]

    def _delta(self, kind: str, **fields: str) -> list[bytes]:
        delta = {"type": kind} | fields
        return [_event("content_block_delta", index=self._blocks, delta=delta)]

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open, index = None, self._blocks
        self._blocks += 1
        return [_event("content_block_stop", index=index)]


def _event(type: str, **fields: Any) -> bytes:  # noqa: A002
    body = msgspec.json.encode({"type": type} | fields)
    return b"event: " + type.encode() + b"\ndata: " + body + b"\n\n"


def routes(service: Service, dialects: Dialects) -> APIRouter:
    """The endpoints, served by ``service``."""
    router = APIRouter(tags=["generate"], route_class=LargeBodies)

    @router.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, as Anthropic's API does."""
        said = body.translated()
        service.check(said)
        encoding = service.encoder.chat(said.messages, said.variables, tools=said.shown_tools)
        prompt = await while_connected(request, encoding)
        plan = dialects.plan(said, prompt.ending)
        make = partial(MessageAnswer, plan.dialect)
        return await service.answer(request, said, make, [prompt.tokens], sampling=plan.sampling)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> dict[str, int]:
        """How many tokens the conversation has."""
        said = body.translated()
        service.check_model(said.model)
        encoding = service.encoder.chat(said.messages, said.variables, tools=said.shown_tools)
        return {"input_tokens": len((await while_connected(request, encoding)).tokens)}

    return router
