"""Builds OpenAI responses, whole or streamed, from the engine's replies."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Voice(Protocol):
    """Makes fields of one choice of its text."""

    def push(self, text: str, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Fields of streamed events, from text and the tokens that completed it."""
        ...

    def finish(self) -> list[dict[str, Any]]:
        """Fields of the last streamed events."""
        ...

    def whole(self) -> dict[str, Any]:
        """Fields of the whole choice."""
        ...

    def reason(self, engine: str) -> str:
        """Why the choice ended, from what the engine says."""
        ...

    def details(self) -> dict[str, int]:
        """Counts of tokens by kind; empty: there are no kinds."""
        ...


class PlainVoice:
    """The text of a completion."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def push(self, text: str, tokens: Sequence[int]) -> list[dict[str, Any]]:
        self._texts.append(text)
        return [{"text": text}]

    def finish(self) -> list[dict[str, Any]]:
        return []

    def whole(self) -> dict[str, Any]:
        return {"text": "".join(self._texts)}

    def reason(self, engine: str) -> str:
        return engine

    def details(self) -> dict[str, int]:
        return {}


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a response that differ between completions and chat completions."""

    prefix: str  # of the response's id
    name: str  # the "object" field of a whole response
    chunk: str  # the "object" field of a streamed event
    voice: Callable[[], Voice]  # of each choice
    silence: dict[str, Any]  # fields of a streamed event without text
    opening: dict[str, Any]  # fields of a choice's first streamed event; empty: no such event
    logprobs: Callable[[Spell, Sequence[int], Found, int], dict[str, Any]]  # fields of a choice


COMPLETION = Shape(
    prefix="cmpl",
    name="text_completion",
    chunk="text_completion",
    voice=PlainVoice,
    silence={"text": ""},
    opening={},
    logprobs=of_completion,
)


def chat_shape(voice: Callable[[], Voice]) -> Shape:
    """Of chat completions whose choices have such voices."""
    return Shape(
        prefix="chatcmpl",
        name="chat.completion",
        chunk="chat.completion.chunk",
        voice=voice,
        silence={"delta": {}},
        opening={"delta": {"role": "assistant", "content": ""}},
        logprobs=of_chat,
    )


@dataclass(slots=True)
class Choice:
    """Replies to one prompt, collected so far."""

    prompt_tokens: int
    voice: Voice
    completion_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reported: int = 0  # characters of tokens whose log-probabilities were streamed
    finished: Finished | None = None

    def finish(self, reply: Finished) -> list[dict[str, Any]]:
        """Note the end; return the fields of the last streamed events."""
        self.finished = reply
        return self.voice.finish()

    @property
    def reason(self) -> str | None:
        """Why it ended; None: it has not."""
        return self.voice.reason(self.finished.reason) if self.finished else None

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
            name: Choice(len(prompt), shape.voice())
            for name, prompt in zip(self.ids, prompts, strict=True)
        }

    async def whole(self, replies: Replies) -> bytes:
        """Collect all ``replies``; return the response as JSON."""
        async with aclosing(replies):
            async for reply in replies:
                choice = self._choices[reply.id]
                if isinstance(reply, Finished):
                    choice.finish(reply)
                else:
                    choice.voice.push(reply.text, reply.tokens)
                    choice.tokens += reply.tokens
                    choice.logprobs += reply.logprobs or []
        choices = []
        for index, choice in enumerate(self._choices.values()):
            tokens = choice.tokens
            logprobs = self._logprobs(choice, tokens, choice.logprobs)
            found = _choice(index, choice.voice.whole(), tokens, choice.reason, logprobs)
            choices.append(found)
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
                    for delta in choice.finish(reply):
                        yield self._event([_choice(index, delta, [])], **choice.usage(options))
                    last = _choice(index, self._shape.silence, [], choice.reason)
                    found = self._tell(reply)
                    yield self._event([last], **choice.usage(options), kvkeep=found)
                elif reply.text or reply.tokens:
                    choice.completion_tokens += len(reply.tokens)
                    logprobs = self._logprobs(choice, reply.tokens, reply.logprobs or ())
                    deltas = choice.voice.push(reply.text, reply.tokens)
                    first, *further = deltas or [self._shape.silence]
                    piece = _choice(index, first, reply.tokens, logprobs=logprobs)
                    yield self._event([piece], **choice.usage(options))
                    for delta in further:
                        yield self._event([_choice(index, delta, [])], **choice.usage(options))
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
        details: Counter[str] = Counter()
        for choice in self._choices.values():
            details.update(choice.voice.details())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        } | ({"completion_tokens_details": dict(details)} if details else {})


def _choice(
    index: int,
    content: dict[str, Any],
    tokens: list[int],
    reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
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
