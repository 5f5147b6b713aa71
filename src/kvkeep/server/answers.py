"""OpenAI's answers, whole or streamed, from the engine's replies."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..engine.messages import Finished, Output, Usage
from ..schema import KvkeepError
from .errors import describe

logger = logging.getLogger(__name__)

Replies = AsyncGenerator[Output | Finished, None]


@dataclass(frozen=True, slots=True)
class Shape:
    """How the answers of two endpoints differ."""

    prefix: str  # of the answer's id
    name: str  # "object" of a whole answer ...
    chunk: str  # ... and of a streamed one
    whole: Callable[[str], dict[str, Any]]  # a choice's text
    delta: Callable[[str], dict[str, Any]]  # some more text of a choice
    opening: dict[str, Any]  # what a streamed choice begins with; empty: nothing


COMPLETION = Shape(
    prefix="cmpl",
    name="text_completion",
    chunk="text_completion",
    whole=lambda text: {"text": text},
    delta=lambda text: {"text": text},
    opening={},
)
CHAT = Shape(
    prefix="chatcmpl",
    name="chat.completion",
    chunk="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    opening={"delta": {"role": "assistant", "content": ""}},
)


@dataclass(slots=True)
class Choice:
    """What the engine has said of one prompt so far."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None


class Answer:
    """The answer to one HTTP request: one choice per prompt, in the order of the prompts."""

    def __init__(self, shape: Shape, model: str, prompts: int) -> None:
        self._shape = shape
        self._head = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self.ids = [f"{self._head['id']}-{index}" for index in range(prompts)]
        self._choices = {name: Choice() for name in self.ids}

    async def whole(self, replies: Replies) -> bytes:
        """Everything at once, as JSON."""
        async with aclosing(replies):
            async for reply in replies:
                choice = self._choices[reply.id]
                if isinstance(reply, Finished):
                    choice.finished = reply
                else:
                    choice.texts.append(reply.text)
                    choice.tokens += reply.tokens
        choices = []
        for index, choice in enumerate(self._choices.values()):
            text, tokens = "".join(choice.texts), choice.tokens
            choices.append(_choice(index, self._shape.whole(text), tokens, choice.finished))
        reports = [_report(usage) for usage in self._usages()]
        body = {
            "object": self._shape.name,
            **self._head,
            "choices": choices,
            "usage": self._usage(),
            "kvkeep": reports[0] if len(reports) == 1 else reports,
        }
        return msgspec.json.encode(body)

    async def events(self, replies: Replies, include_usage: bool) -> AsyncGenerator[bytes, None]:
        """Piece by piece, as server-sent events. A failure becomes an event of its own."""
        index_of = {name: index for index, name in enumerate(self.ids)}
        unopened = set(self.ids) if self._shape.opening else set()
        usage = {"usage": None} if include_usage else {}
        try:
            async with aclosing(replies):
                async for reply in replies:
                    index = index_of[reply.id]
                    if reply.id in unopened:
                        unopened.discard(reply.id)
                        yield self._event([_choice(index, self._shape.opening, [])], **usage)
                    if isinstance(reply, Finished):
                        self._choices[reply.id].finished = reply
                        last = _choice(index, self._shape.delta(""), [], reply)
                        yield self._event([last], **usage, kvkeep=_report(reply.usage))
                    elif reply.text or reply.tokens:
                        piece = _choice(index, self._shape.delta(reply.text), reply.tokens)
                        yield self._event([piece], **usage)
            if include_usage:
                yield self._event([], usage=self._usage())
        except Exception as error:
            if not isinstance(error, KvkeepError):
                logger.exception("a stream failed")
            yield _data(describe(error)[1])
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return _data({"object": self._shape.chunk, **self._head, "choices": choices, **fields})

    def _usages(self) -> list[Usage]:
        return [choice.finished.usage for choice in self._choices.values() if choice.finished]

    def _usage(self) -> dict[str, Any]:
        """OpenAI's ``usage``, of all choices together."""
        usages = self._usages()
        prompt = sum(usage.prompt_tokens for usage in usages)
        completion = sum(usage.completion_tokens for usage in usages)
        cached = sum(sum(usage.cached_tokens.values()) for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _choice(
    index: int, content: dict[str, Any], tokens: list[int], finished: Finished | None = None
) -> dict[str, Any]:
    reason = finished.reason if finished else None
    return {"index": index, **content, "logprobs": None, "finish_reason": reason} | {
        "token_ids": tokens  # beside the text: decoding and encoding need not give them back
    }


def _report(usage: Usage) -> dict[str, Any]:
    """The ``kvkeep`` object: all of ``usage`` that OpenAI's has no place for."""
    report: dict[str, Any] = msgspec.to_builtins(usage)
    for known in ("prompt_tokens", "completion_tokens"):
        del report[known]
    if report["proposals"] is None:
        del report["proposals"]
    return report


def _data(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
