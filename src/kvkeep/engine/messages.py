"""The messages between a front end and the engine.

All messages are plain data that MessagePack can carry: an engine may run in a process of its own.
They carry tokens, and the front end makes text of them. A front end sends :data:`Request` messages
and receives :data:`Reply` messages. Every reply carries the ``id`` of the request that it answers.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from ..schema import RequestError

MOST_LOGPROBS = 20
"""Likeliest tokens that a request may ask for, as in OpenAI's API."""


JSON_SPACE = r"[ \n\r\t]{0,32}"
"""Between the parts of JSON. A model that only adds space would else go on until its limit."""


class Grammar(msgspec.Struct, frozen=True):
    """What the whole answer must match."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str  # the schema as JSON, the expression, or llguidance's variant of Lark


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters and stop conditions of one request. Validated at construction.

    Raises:
        RequestError: a value is out of range.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0  # [0, 1]: least probability, as a part of the likeliest token's
    seed: int | None = None  # any 64-bit integer; None: the engine draws one
    max_tokens: int = 16  # maximum number of new tokens, at least 1
    stop: tuple[str, ...] = ()  # strings that end the text; excluded from the output
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's EOS tokens
    ignore_eos: bool = False  # True: the model's EOS tokens do not end generation
    min_tokens: int = 0  # before that many new tokens, no EOS or stop token is drawn
    repetition_penalty: float = 1.0  # of tokens in the prompt or answer: divides positive logits
    frequency_penalty: float = 0.0  # subtracted per occurrence in the answer
    presence_penalty: float = 0.0  # subtracted once for tokens in the answer
    logit_bias: dict[int, float] = {}  # token id -> added to its logit
    grammar: Grammar | None = None  # None: any text
    spelled: tuple[int, ...] = ()  # special tokens that are part of the text
    logprobs: int | None = None  # log-probabilities of the tokens and so many likeliest; None: none

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 1e3):
            raise RequestError(f"temperature must be from 0 to 1000, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 1 and self.top_k != -1:
            raise RequestError(f"top_k must be at least 1, or -1 to disable it, not {self.top_k}")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if any(not s for s in self.stop):
            raise RequestError("a stop string must not be empty")
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be from 0 to 1, not {self.min_p}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(f"min_tokens must be from 0 to max_tokens, not {self.min_tokens}")
        if not 0 < self.repetition_penalty <= 1e3:
            raise RequestError(
                f"repetition_penalty must be above 0 and at most 1000, "
                f"not {self.repetition_penalty}"
            )
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise RequestError(f"{name} must be from -2 to 2, not {getattr(self, name)}")
        if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise RequestError("logit_bias must be from -100 to 100 for each token")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise RequestError(f"logprobs must be from 0 to {MOST_LOGPROBS}, not {self.logprobs}")

    @property
    def processed(self) -> bool:
        """The logits change before a token is drawn from them; see ``engine/processors.py``."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.min_tokens
            or self.grammar
        )


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Generate tokens from a prompt. Answered by :class:`Output` and :class:`Finished`."""

    id: str
    tokens: list[int]  # the prompt; not empty, each in [0, vocab_size)
    sampling: Sampling
    namespace: str = ""  # requests share prefixes only within one namespace (salt, adapter, ...)
    priority: int = 0  # 0 to 255: under "priority", scheduled first and evicted last
    ttl: float | None = None  # seconds from its end for which its pages have its priority
    deadline_seconds: float | None = None  # from arrival; a request that runs then fails
    prompt_logprobs: bool = False  # of the prompt's tokens too; the prompt is computed anew
    no_store: bool = False  # True: what it computes is forgotten when it ends; it may still hit
    speculate: bool = True  # False: decode this request without the draft model
    report_proposals: bool = False  # return all draft proposals in Finished


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop a request and release its pages. No reply; an unknown or finished id is ignored."""

    id: str


class Evict(msgspec.Struct, frozen=True, tag=True):
    """Evict every unpinned page from a memory tier. Answered by :class:`Done`."""

    id: str
    tier: str  # "device" or "host"


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Ask for the engine's metrics. Answered by :class:`Figures`."""

    id: str


Request = Generate | Abort | Evict | Ask


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural logarithms of probabilities in one place, before processors and temperature."""

    logprob: float | None  # of the token; None: of a prompt's first, which nothing predicts
    top: list[tuple[int, float]]  # the likeliest tokens, likeliest first


class Output(msgspec.Struct, frozen=True, tag=True):
    """New tokens of a request, in order of generation."""

    id: str
    tokens: list[int]
    shown: int  # so many of the tokens are text: all but a stop token, which comes last
    logprobs: list[TokenLogprobs] | None = None  # of ``tokens``, if requested
    # the rest only in the first output of a request
    prompt_logprobs: list[TokenLogprobs] | None = None  # from its second token on, if requested
    cached: dict[str, int] | None = None  # tokens of the prefix hit, by tier


TIERS = ("none", "device", "host", "storage")
"""Where the slowest part of a prefix hit may have come from; "none": there was no hit."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts, prefix hit, latencies and speculation of one request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: dict[str, int]  # prefix hit by tier: "device", "host", "storage"
    limited_by: str | None = None  # the group whose missing pages shortened the hit, if any
    skipped_tokens: int = 0  # on the host, but faster to compute than to load
    loaded_bytes: int = 0  # loaded from host to device for this request
    load_ms: float = 0.0  # duration of that load
    wait_ms: float = 0.0  # from arrival to scheduling
    ttft_ms: float = 0.0  # from arrival to the first token
    decode_ms: float = 0.0  # from the first token to the last
    verify_steps: int = 0  # speculative rounds: one draft chain, one verification
    accept_length: float | None = None  # mean tokens per round, bonus token included; None: none
    proposals: list[list[int]] | None = None  # draft proposals per round, if requested
    preemptions: int = 0

    @property
    def tier_of_hit(self) -> str:
        """The slowest tier that the prefix hit came from, of :data:`TIERS`."""
        return next((tier for tier in reversed(TIERS) if self.cached_tokens.get(tier)), "none")


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The last message of a request that the engine completed."""

    id: str
    reason: str  # "stop", "length", "abort"
    usage: Usage


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last message of a request that failed. ``kind`` is the error's class name."""

    id: str
    kind: str
    message: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """An administrative request has completed."""

    id: str
    count: int = 0  # evicted pages; a page counts once for each group


class Figures(msgspec.Struct, frozen=True, tag=True):
    """Metrics by name. A name may carry Prometheus labels: ``evictions{tier=host}``.

    Names that end in ``_total`` are counters; all others are gauges."""

    id: str
    values: dict[str, float]


Reply = Output | Finished | Failed | Done | Figures


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a front end needs to know about the model that the engine serves."""

    name: str
    context_length: int  # prompt and new tokens together
    vocab_size: int
    page_tokens: int
    draft: str | None  # name of the draft model, if there is one
    pools: dict[str, int]  # "GROUP on TIER" -> capacity in tokens (recurrent state: in states)
