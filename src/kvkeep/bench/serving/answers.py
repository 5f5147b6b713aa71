"""What servers answer, as far as benchmarks read it, and the record of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


class Failure(Exception):
    """A request failed. ``kind`` is what failures are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The record of one request. Times are seconds of one monotonic clock."""

    start: float  # when the request was sent
    end: float  # when its last event arrived, or it failed
    times: tuple[float, ...] = ()  # arrival of each event that brought text or tokens
    text: str = ""
    tokens: tuple[int, ...] = ()  # empty: the server returns no token ids
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None  # of the prompt, from the cache; None: not reported
    tiers: Mapping[str, int]  # cached tokens by tier; empty: not reported
    accept_length: float | None = None  # tokens per verification; None: none, or not reported
    verify_steps: int = 0  # verifications; 0: not reported
    error: str = ""  # kind of failure; empty: the request succeeded
    message: str = ""  # of the failure

    @property
    def latency(self) -> float:
        """Seconds from the request to its last event."""
        return self.end - self.start

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None: the answer was not streamed, or is empty."""
        return self.times[0] - self.start if self.times else None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name

    @property
    def text(self) -> str:
        return (self.reasoning_content or self.reasoning or "") + (self.content or "")


class _MetaInfo(msgspec.Struct):  # SGLang's
    spec_accept_length: float | None = None
    spec_verify_ct: int | None = None


class _Choice(msgspec.Struct):
    text: str | None = None  # of completions
    delta: _Message | None = None  # of a streamed chat
    message: _Message | None = None  # of a whole chat
    token_ids: list[int] | None = None  # kvkeep's, and vLLM's on request
    finish_reason: str | None = None
    meta_info: _MetaInfo | None = None

    @property
    def words(self) -> str:
        said = self.delta or self.message
        return self.text or (said.text if said else "")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Kvkeep(msgspec.Struct):
    cached_tokens: dict[str, int] = {}
    accept_length: float | None = None
    verify_steps: int = 0


class _Extension(msgspec.Struct):  # SGLang's
    cached_tokens_details: dict[str, Any] | None = None


class Body(msgspec.Struct):
    """A whole response or one event of a stream. Unknown fields are ignored."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    kvkeep: _Kvkeep | None = None
    sglext: _Extension | None = None
    error: Any = None


read_body = msgspec.json.Decoder(Body).decode
"""A :class:`Body` from JSON; raises ``msgspec.MsgspecError``."""


class Gathered:
    """One response, collected event by event."""

    def __init__(self, start: float) -> None:
        self._start = self._end = start
        self._times: list[float] = []
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._usage = _Usage()
        self._tiers: dict[str, int] = {}
        self._accept_length: float | None = None
        self._verify_steps = 0
        self._finished = False

    def take(self, body: Body, now: float) -> None:
        """Add what arrived at ``now``.

        Raises:
            Failure: it is an error event.
        """
        if body.error is not None:
            raise Failure("error event", message_of(body.error))
        self._end = now
        for choice in body.choices:
            if choice.words or choice.token_ids:
                self._times.append(now)
                self._texts.append(choice.words)
                self._tokens += choice.token_ids or ()
            if choice.finish_reason is not None:
                self._finished = True
            if meta := choice.meta_info:
                self._accept_length = meta.spec_accept_length
                self._verify_steps = meta.spec_verify_ct or 0
        if body.usage is not None:
            self._usage = body.usage
        if body.kvkeep is not None:
            self._tiers = body.kvkeep.cached_tokens
            self._accept_length = body.kvkeep.accept_length
            self._verify_steps = body.kvkeep.verify_steps
        if body.sglext is not None:
            details = body.sglext.cached_tokens_details or {}
            self._tiers = {tier: n for tier, n in details.items() if isinstance(n, int)}

    def check_finished(self) -> None:
        """Raise :class:`Failure` unless a choice said why it finished."""
        if not self._finished:
            raise Failure("cut short", "the response ended without a finish reason")

    def answer(self, streamed: bool, prompt_tokens: int | None) -> Answer:
        """The record of a response that is complete.

        Args:
            streamed: False: when events arrived tells nothing of single tokens.
            prompt_tokens: of the prompt, if known; used where the server does not report it.
        """
        usage, details = self._usage, self._usage.prompt_tokens_details
        cached = details.cached_tokens if details else None
        if self._tiers and cached is None:
            cached = sum(self._tiers.values())
        output = usage.completion_tokens
        return Answer(
            start=self._start,
            end=self._end,
            times=tuple(self._times) if streamed else (),
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            prompt_tokens=usage.prompt_tokens or prompt_tokens or 0,
            output_tokens=len(self._tokens or self._times) if output is None else output,
            cached_tokens=cached,
            tiers=self._tiers,
            accept_length=self._accept_length,
            verify_steps=self._verify_steps,
        )

    def failed(self, failure: Failure, end: float) -> Answer:
        """The record of a request that failed at ``end``, with the tokens that came before."""
        return Answer(
            start=self._start,
            end=end,
            output_tokens=len(self._tokens or self._times),
            tiers={},
            error=failure.kind,
            message=failure.message,
        )


def message_of(error: object) -> str:
    """What an error says: OpenAI's ``{"error": {"message"}}`` and other shapes of it."""
    while isinstance(error, dict):
        error = error.get("error", error.get("message", error.get("detail", str(error))))
    return " ".join(str(error).split())[:300]
