"""Builds OpenAI responses, whole or streamed, from the engine's replies."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..engine.client import Piece
from ..engine.messages import Finished, TokenLogprobs, Usage
from ..schema import KvkeepError
from .errors import describe
from .logprobs import Found, Spell, of_chat, of_completion
from .protocol import StreamOptions

logger = logging.getLogger(__name__)

Replies = AsyncGenerator[Piece | Finished, None]
Tell = Callable[[Finished], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a response that differ between completions and chat completions."""

    prefix: str  # of the response's id
    name: str  # the "object" field of a whole response
    chunk: str  # the "object" field of a streamed event
    whole: Callable[[str], dict[str, Any]]  # text -> fields of a whole choice
    delta: Callable[[str], dict[str, Any]]  # new text -> fields of a streamed choice
    opening: dict[str, Any]  # fields of a choice's first streamed event; empty: no such event
    logprobs: Callable[[Spell, Sequence[int], Found, int], dict[str, Any]]  # fields of a choice


COMPLETION = Shape(
    prefix="cmpl",
    name="text_completion",
    chunk="text_completion",
    whole=lambda text: {"text": text},
    delta=lambda text: {"text": text},
    opening={},
    logprobs=of_completion,
)
CHAT = Shape(
    prefix="chatcmpl",
    name="chat.completion",
    chunk="chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    delta=lambda text: {"delta": {"content": text} if text else {}},
    opening={"delta": {"role": "assistant", "content": ""}},
    logprobs=of_chat,
)


@dataclass(slots=True)
class Choice:
    """Replies to one prompt, collected so far."""

    prompt_tokens: int
    completion_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reported: int = 0  # characters of tokens whose log-probabilities were streamed
    finished: Finished | None = None

    def usage(self, options: StreamOptions) -> dict[str, Any]:
        """The ``usage`` field of a streamed event of this choice, if it has one."""
        if not options.continuous_usage_stats:
            return {"usage": None} if options.include_usage else {}
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return {"usage": counts | {"total_tokens": sum(counts.values())}}


class Answer:
    """The response to one HTTP request: ``n`` choices per prompt, in the order of the prompts.

    Args:
        spell: the text of one token alone.
        n: ``prompts`` has each prompt so many times.
        tell: makes a choice's ``kvkeep`` object; None: :func:`report`.
    """

    def __init__(
        self,
        shape: Shape,
        model: str,
        prompts: Sequence[Sequence[int]],
        spell: Spell = chr,
        n: int = 1,
        tell: Tell | None = None,
    ) -> None:
        self._shape, self._spell, self._n = shape, spell, n
        self._tell = tell or report
        self.id = f"{shape.prefix}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
        }
        self.ids = [f"{self.id}-{index}" for index in range(len(prompts))]
        self._choices = {
            name: Choice(len(prompt)) for name, prompt in zip(self.ids, prompts, strict=True)
        }

    async def whole(self, replies: Replies) -> bytes:
        """Collect all ``replies``; return the response as JSON."""
        async with aclosing(replies):
            async for reply in replies:
                choice = self._choices[reply.id]
                if isinstance(reply, Finished):
                    choice.finished = reply
                else:
                    choice.texts.append(reply.text)
                    choice.tokens += reply.tokens
                    choice.logprobs += reply.logprobs or []
        choices = []
        for index, choice in enumerate(self._choices.values()):
            text, tokens = "".join(choice.texts), choice.tokens
            logprobs = self._logprobs(choice, tokens, choice.logprobs)
            choices.append(
                _choice(index, self._shape.whole(text), tokens, choice.finished, logprobs)
            )
        ends = (choice.finished for choice in self._choices.values())
        reports = [self._tell(end) for end in ends if end]
        body = {
            "object": self._shape.name,
            **self._head,
            "choices": choices,
            "usage": self._usage(),
            "kvkeep": reports[0] if len(reports) == 1 else reports,
        }
        return msgspec.json.encode(body)

    def events(self, replies: Replies, options: StreamOptions) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events."""
        return closed_events(self._events(replies, options))

    async def _events(
        self, replies: Replies, options: StreamOptions
    ) -> AsyncGenerator[bytes, None]:
        index_of = {name: index for index, name in enumerate(self.ids)}
        unopened = set(self.ids) if self._shape.opening else set()
        async with aclosing(replies):
            async for reply in replies:
                index, choice = index_of[reply.id], self._choices[reply.id]
                if reply.id in unopened:
                    unopened.discard(reply.id)
                    opening = _choice(index, self._shape.opening, [])
                    yield self._event([opening], **choice.usage(options))
                if isinstance(reply, Finished):
                    choice.finished = reply
                    last = _choice(index, self._shape.delta(""), [], reply)
                    found = self._tell(reply)
                    yield self._event([last], **choice.usage(options), kvkeep=found)
                elif reply.text or reply.tokens:
                    choice.completion_tokens += len(reply.tokens)
                    logprobs = self._logprobs(choice, reply.tokens, reply.logprobs or ())
                    delta = self._shape.delta(reply.text)
                    piece = _choice(index, delta, reply.tokens, logprobs=logprobs)
                    yield self._event([piece], **choice.usage(options))
        if options.include_usage:
            yield self._event([], usage=self._usage())

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> bytes:
        return data({"object": self._shape.chunk, **self._head, "choices": choices, **fields})

    def _logprobs(self, choice: Choice, tokens: list[int], found: Found) -> dict[str, Any] | None:
        """The ``logprobs`` of a choice, or of a streamed part of it; None: not wanted."""
        if not found:
            return None
        start, spelt = choice.reported, map(self._spell, tokens)
        choice.reported += sum(map(len, spelt))
        return self._shape.logprobs(self._spell, tokens, found, start)

    def _usages(self) -> list[Usage]:
        return [choice.finished.usage for choice in self._choices.values() if choice.finished]

    def _usage(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object, summed over all choices; each prompt counts once."""
        usages = self._usages()
        prompt = sum(usage.prompt_tokens for usage in usages[:: self._n])
        completion = sum(usage.completion_tokens for usage in usages)
        cached = sum(sum(usage.cached_tokens.values()) for usage in usages[:: self._n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _choice(
    index: int,
    content: dict[str, Any],
    tokens: list[int],
    finished: Finished | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    reason = finished.reason if finished else None
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason} | {
        "token_ids": tokens  # beside the text: re-encoding it may give other tokens
    }


def report(reply: Finished) -> dict[str, Any]:
    """The ``kvkeep`` object: the fields of the usage that OpenAI's ``usage`` does not have."""
    found: dict[str, Any] = msgspec.to_builtins(reply.usage)
    for known in ("prompt_tokens", "completion_tokens"):
        del found[known]
    if found["proposals"] is None:
        del found["proposals"]
    return found


def explanation(reply: Finished) -> dict[str, Any]:
    """What ``GET /cache/explain/{id}`` tells of one prompt: its report, and how it ended."""
    usage = reply.usage
    return {
        "id": reply.id,
        "reason": reply.reason,
        "tier_of_hit": usage.tier_of_hit,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    } | report(reply)


async def closed_events(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """``events``, an error event if they fail, and the mark of the end."""
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except Exception as error:
        if not isinstance(error, KvkeepError):
            logger.exception("a streamed response failed")
        yield data(describe(error)[1])
    yield b"data: [DONE]\n\n"


def data(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
