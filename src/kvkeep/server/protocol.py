"""What clients may send: OpenAI's requests, and the fields that kvkeep and SGLang add to them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..engine.messages import Sampling

IGNORED = (
    *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("service_tier", "store", "user"),
)
"""Fields of OpenAI's that change nothing in what is generated."""

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
"""Fields that are not supported, with the values that ask for nothing."""

Tokens = Annotated[list[int], Field(fail_fast=True)]
Prompt = (
    str
    | Tokens
    | Annotated[list[str], Field(fail_fast=True)]
    | Annotated[list[Tokens], Field(fail_fast=True)]
)


class Strict(BaseModel):
    """No coercion, no NaN, no field that nobody reads. ``null`` is the same as absent."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if name in cls.model_fields or not _asks_for_nothing(name, value)
            if value is not None
        }


def _asks_for_nothing(name: str, value: Any) -> bool:
    return name in IGNORED or any(
        value == neutral and type(value) is type(neutral) for neutral in NEUTRAL.get(name, ())
    )


class StreamOptions(Strict):
    """How a stream is sent."""

    include_usage: bool = False
    include_obfuscation: bool = False  # padding is never sent


class KvkeepOptions(Strict):
    """The ``kvkeep`` object of a request."""

    speculate: bool = True  # False: no draft model for this request
    report_proposals: bool = False  # answer with every proposal of the draft


class GenerationRequest(Strict):
    """What completions and chats have in common."""

    model: str | None = None  # None: the one that is served
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # OpenAI's newer name of max_tokens
    stop: str | list[str] = []
    stop_token_ids: Tokens = []
    ignore_eos: bool = False
    cache_salt: str = ""  # prefixes are shared only between requests of one salt ...
    extra_key: str = ""  # ... and one extra key
    priority: int = Field(default=0, ge=0, le=255)  # how long its pages should stay cached
    kvkeep: KvkeepOptions = KvkeepOptions()

    @property
    def namespace(self) -> str:
        """Salt and extra key, joined so that no two pairs give the same name."""
        pair = [self.cache_salt, self.extra_key]
        return json.dumps(pair) if any(pair) else ""

    @property
    def limit(self) -> int | None:
        """The number of new tokens asked for, if the request says."""
        both = self.max_completion_tokens, self.max_tokens
        return next((limit for limit in both if limit is not None), None)

    def sampling(self, max_tokens: int) -> Sampling:
        """How to choose tokens.

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
    """The one kind of message part that is supported."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat. Further fields go to the model's template as they are."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    role: str
    content: str | list[TextPart]

    def flat(self) -> dict[str, Any]:
        """With the content as one string, which is what templates expect."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return self.model_dump() | {"content": text}


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message]
    chat_template_kwargs: dict[str, Any] = {}  # variables of the model's own template


class EvictRequest(Strict):
    """Body of ``POST /kvkeep/evict``."""

    tier: Literal["device", "host"]
