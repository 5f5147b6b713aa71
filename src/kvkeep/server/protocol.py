"""Request bodies: OpenAI's fields, and the ones that SGLang and kvkeep add."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ..engine.messages import Grammar, Sampling
from ..schema import RequestError
from .defaults import SAMPLED
from .fields import Strict, Tolerant
from .limits import MOST_MESSAGES, MOST_NAME, MOST_STOP, Many
from .tools import MOST_TOOLS, Tool, ToolCall, ToolChoice

Name = Annotated[str, Field(max_length=MOST_NAME)]
Tokens = Many[int]
Prompt = str | Tokens | Many[str] | Many[Tokens]


class StreamOptions(Strict):
    """OpenAI's ``stream_options``, and vLLM's and SGLang's ``continuous_usage_stats``."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False  # an event at the end with the usage of all choices
    continuous_usage_stats: bool = False  # in every event, the usage of its choice so far
    include_obfuscation: bool = False  # ignored: kvkeep never sends padding


class JsonSchema(Tolerant):
    """The ``json_schema`` of OpenAI's ``response_format``. Every schema is followed strictly."""

    name: str = ""
    definition: dict[str, Any] | bool = Field(default=True, alias="schema")


class ResponseFormat(Strict):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @property
    def schema_text(self) -> str | None:
        """The schema that the whole answer must match, as JSON; None: any text."""
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError("response_format needs json_schema")
        if self.type == "json_object":
            return '{"type": "object"}'
        return json.dumps(self.json_schema.definition) if self.json_schema else None


class KvkeepOptions(Strict):
    """The ``kvkeep`` object of a request."""

    deadline_seconds: float | None = Field(default=None, ge=0)  # from arrival; then it fails
    speculate: bool = True  # False: decode this request without the draft model
    report_proposals: bool = False  # return all draft proposals
    explain: bool = False  # return what GET /cache/explain/{id} tells


def _numbers(biases: Any) -> Any:
    """Refuse a dict at its first value that is no number, as :data:`Many` does a list."""
    for token, bias in biases.items() if type(biases) is dict else ():
        if type(bias) not in (int, float):
            raise PydanticCustomError(
                "number", "Input should be a number ({token})", {"token": token}
            )
    return biases


class GenerationRequest(Tolerant):
    """Fields that completions and chat completions share."""

    model: Name | None = None  # None: the served model
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    n: int = Field(default=1, ge=1, le=128)  # choices per prompt
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # OpenAI's newer name for max_tokens; wins over it
    stop: str | Annotated[list[str], Field(max_length=MOST_STOP)] = Field(default_factory=list)
    stop_token_ids: Annotated[Tokens, Field(max_length=MOST_STOP)] = Field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    # by token id
    logit_bias: Annotated[dict[str, float], BeforeValidator(_numbers)] = Field(default_factory=dict)
    response_format: ResponseFormat = ResponseFormat()
    json_schema: str | dict[str, Any] | None = None  # SGLang's, as response_format's
    regex: str | None = None  # that the whole answer must match
    rid: Name | Many[Name] = Field(default_factory=list)  # names to abort the request by
    cache_salt: Name = ""  # requests share prefixes only if their cache_salt is equal ...
    extra_key: Name = ""  # ... and their extra_key, too
    no_store: bool = False  # True: forget what this request computes when it ends
    priority: int = Field(
        default=0, ge=0, le=255
    )  # under "priority": scheduled first, kept longest
    ttl: float | None = Field(default=None, ge=0)  # seconds for which its pages keep its priority
    kvkeep: KvkeepOptions = KvkeepOptions()

    @property
    def namespace(self) -> str:
        """The cache namespace: salt and extra key, joined injectively. Empty if both are."""
        pair = [self.cache_salt, self.extra_key]
        return json.dumps(pair) if any(pair) else ""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def rids(self) -> list[str]:
        """Names by which the request can be aborted."""
        return [self.rid] if isinstance(self.rid, str) else self.rid

    @property
    def limit(self) -> int | None:
        """Maximum number of new tokens; None if the request does not set one."""
        both = self.max_completion_tokens, self.max_tokens
        return next((limit for limit in both if limit is not None), None)

    @property
    def wanted_logprobs(self) -> int | None:
        """How many likeliest tokens to report in each place; None: no log-probabilities."""
        return None

    @property
    def grammar(self) -> Grammar | None:
        """What the whole answer must match.

        Raises:
            RequestError: several fields say it.
        """
        schema = self.json_schema
        schemas = [
            self.response_format.schema_text,
            schema if isinstance(schema, str | None) else json.dumps(schema),
        ]
        given = [Grammar("json_schema", text) for text in schemas if text is not None]
        given += [Grammar("regex", self.regex)] if self.regex is not None else []
        if len(given) > 1:
            raise RequestError("response_format, json_schema and regex exclude each other")
        return given[0] if given else None

    def sampling(self, max_tokens: int, defaults: Mapping[str, Any], choice: int = 0) -> Sampling:
        """The sampling parameters of a prompt's choice number ``choice``; ``defaults`` are for
        those that the request does not name.

        Raises:
            RequestError: a value is out of range.
        """
        if not all(token.isdecimal() for token in self.logit_bias):
            raise RequestError("logit_bias must have token ids as keys")
        names = self.model_fields_set & set(SAMPLED)
        return Sampling(
            **{**defaults, **{name: getattr(self, name) for name in names}},
            seed=self.seed if self.seed is None else self.seed + choice,
            max_tokens=max_tokens,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            grammar=self.grammar,
            logprobs=self.wanted_logprobs,
        )


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompt
    echo: bool = False  # begin the answer with the prompt
    logprobs: int | Literal[False] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return None if self.logprobs is False else self.logprobs


class TextPart(Strict):
    """A text part of a message: the only supported kind."""

    model_config = ConfigDict(extra="ignore")  # such as cache_control

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat. Unknown fields are passed to the chat template unchanged."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

    role: str
    content: str | Many[TextPart] | None = None
    tool_calls: Many[ToolCall] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "Field required: content")
        return self

    @property
    def text(self) -> str:
        """The content as one string."""
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)

    def flat(self, as_objects: bool = True) -> dict[str, Any]:
        """The message as chat templates expect it: with its content as one string.

        Args:
            as_objects: arguments of calls are objects, else text.
        """
        calls = [call.flat(as_objects) for call in self.tool_calls or ()]
        dumped = self.model_dump(exclude={"tool_calls"}) | {"content": self.text}
        return dumped | ({"tool_calls": calls} if calls else {})


Messages = Annotated[Many[Message], Field(max_length=MOST_MESSAGES)]


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    logprobs: bool = False
    top_logprobs: int = 0
    tools: Annotated[Many[Tool], Field(max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True  # False: one call at most
    separate_reasoning: bool = True  # False: reasoning stays content
    stream_reasoning: bool = True  # False: a stream has reasoning in one piece
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # more of its variables
    reasoning_effort: str | None = None  # one more of them, under this name

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true")
        return self.top_logprobs if self.logprobs else None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """Tools for the chat template."""
        return [] if self.tool_choice == "none" else [tool.given() for tool in self.tools]

    @property
    def usable(self) -> list[Tool]:
        """Tools that the model may call.

        Raises:
            RequestError: two have one name, or the chosen one is not there.
        """
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise RequestError("tools must not have two functions of one name")
        match self.tool_choice:
            case "none":
                return []
            case "auto":
                return self.tools
            case "required":
                if not names:
                    raise RequestError("tool_choice must not be required without tools")
                return self.tools
            case named:
                found = [one for one in self.tools if one.function.name == named.function.name]
                if not found:
                    raise RequestError(f"tool_choice {named.function.name!r} is not in tools")
                return found

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = self.reasoning_effort
        return ({} if effort is None else {"reasoning_effort": effort}) | self.chat_template_kwargs


class TokenizeRequest(Tolerant):
    """Body of ``POST /tokenize``: a prompt, several, or a chat."""

    model: Name | None = None
    prompt: str | Many[str] | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # None: for prompts, and not for chats
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class DetokenizeRequest(Tolerant):
    """Body of ``POST /detokenize``."""

    model: Name | None = None
    tokens: Tokens
    skip_special_tokens: bool = False


class AbortRequest(Tolerant):
    """Body of ``POST /abort_request``."""

    rid: Name = ""  # of the request, or the id of its response
    abort_all: bool = False


class EvictRequest(Strict):
    """Body of ``POST /kvkeep/evict``."""

    tier: Literal["device", "host"]
