"""Request bodies: OpenAI's fields, and the ones that SGLang and kvkeep add."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..engine.messages import Sampling

IGNORED = (
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "store", "user"),
)
"""OpenAI's fields that do not affect generation. Accepted and ignored."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Unsupported fields, each with its neutral values. Only a neutral value is accepted."""

Tokens = Annotated[list[int], Field(fail_fast=True)]
Prompt = (
    str
    | Tokens
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[Tokens], Field(fail_fast=True)]
)


class Strict(BaseModel):
    """Rejects type coercion, NaN and unknown fields. Treats ``null`` as absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if name in cls.model_fields or not _is_neutral(name, value)
            if value is not None
        }


def _is_neutral(name: str, value: Any) -> bool:
    return name in IGNORED or any(
        value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, ())
    )


class StreamOptions(Strict):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False  # ignored: kvkeep never sends padding


class KvkeepOptions(Strict):
    """The ``kvkeep`` object of a request."""

    speculate: bool = True  # False: decode this request without the draft model
    report_proposals: bool = False  # return all draft proposals


class GenerationRequest(Strict):
    """Fields that completions and chat completions share."""

    model: str | None = None  # None: the served model
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # OpenAI's newer name for max_tokens; wins over it
    stop: str | list[str] = []
    stop_token_ids: Tokens = []
    ignore_eos: bool = False
    cache_salt: str = ""  # requests share prefixes only if their cache_salt is equal ...
    extra_key: str = ""  # ... and their extra_key, too
    priority: int = Field(default=0, ge=0, le=255)  # eviction order "priority": lowest goes first
    kvkeep: KvkeepOptions = KvkeepOptions()

    @property
    def namespace(self) -> str:
        """The cache namespace: salt and extra key, joined injectively. Empty if both are."""
        pair = [self.cache_salt, self.extra_key]
        return json.dumps(pair) if any(pair) else ""

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens; None if the request does not set one."""
        both = self.max_completion_tokens, self.max_tokens
        return next((limit for limit in both if limit is not None), None)

    def sampling(self, max_tokens: int) -> Sampling:
        """The request's sampling parameters.

        Raises:
            RequestError: a value is out of range.
        """
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt


class TextPart(Strict):
    """A text part of a message: the only supported kind."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat. Unknown fields are passed to the chat template unchanged."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    role: str
    content: str | list[TextPart]

    def flat(self) -> dict[str, Any]:
        """The message with its content as one string, as chat templates expect it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return self.model_dump() | {"content": text}


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    chat_template_kwargs: dict[str, Any] = {}  # further variables of the chat template


class EvictRequest(Strict):
    """Body of ``POST /kvkeep/evict``."""

    tier: Literal["device", "host"]
