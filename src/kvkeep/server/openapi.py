"""The OpenAPI document: what endpoints answer, which errors they have, and examples.

Endpoints answer bytes that they encode themselves, so that FastAPI knows nothing of them. The
models here describe them and are for this document alone.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ..engine.messages import ModelInfo

TAGS = {
    "generate": "Generation. OpenAI's and SGLang's endpoints, with kvkeep's fields.",
    "tokens": "Text to tokens, and back.",
    "info": "What is served here, and whether it is up.",
    "admin": "For operators: metrics, eviction, aborts, reports on recent requests.",
}


class Problem(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Failure(BaseModel):
    """Every error, in OpenAI's format."""

    error: Problem


class AnthropicProblem(BaseModel):
    type: str
    message: str


class AnthropicFailure(BaseModel):
    """Every error, in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicProblem


class Report(BaseModel):
    """What a request found in the cache, and how it was computed. Times are in ms."""

    cached_tokens: dict[Literal["device", "host", "storage"], int]
    limited_by: str | None
    skipped_tokens: int
    loaded_bytes: int
    load_ms: float
    wait_ms: float
    ttft_ms: float
    decode_ms: float
    verify_steps: int
    accept_length: float | None
    preemptions: int
    proposals: list[list[int]] = []


class CachedTokens(BaseModel):
    cached_tokens: int


class Tally(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(BaseModel):
    index: int
    finish_reason: str | None
    token_ids: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: Logprobs | None


class TokenLogprob(BaseModel):
    token: str
    logprob: float | None
    bytes: list[int] | None


class TopLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[TopLogprob] | None
    refusal: None


class ChatAnswer(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None


class ChatChoice(Choice):
    message: ChatAnswer
    logprobs: ChatLogprobs | None


class Whole(BaseModel):
    id: str
    created: int
    model: str
    usage: Tally
    kvkeep: Report | list[Report]


class Completion(Whole):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(Whole):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Spent(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class SpokenMessage(BaseModel):
    """As Anthropic's API has it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use"] | None
    stop_sequence: str | None
    usage: Spent


class InputCount(BaseModel):
    input_tokens: int


class Meta(BaseModel):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generated(BaseModel):
    text: str
    output_ids: list[int]
    meta_info: Meta


class Encoded(BaseModel):
    """``tokens`` is a list of lists, and ``count`` a list, for several prompts."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]


class Decoded(BaseModel):
    prompt: str
    text: str


class Evicted(BaseModel):
    tier: Literal["device", "host"]
    evicted: int


class Flushed(BaseModel):
    success: bool
    evicted: dict[Literal["device", "host"], int]


class AbortCount(BaseModel):
    aborted: int


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    kvkeep: dict[str, Any]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class ServedModel(BaseModel):
    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None


class ServerSettings(BaseModel):
    served_model_name: str
    context_length: int
    max_total_num_tokens: int
    pools: dict[str, int]
    version: str


class Version(BaseModel):
    version: str


class State(BaseModel):
    status: Literal["ok", "ready"]


class Explained(BaseModel):
    id: str
    requests: list[dict[str, Any]]


ANSWERS: dict[str, type[BaseModel]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/messages": SpokenMessage,
    "/v1/messages/count_tokens": InputCount,
    "/generate": Generated,
    "/tokenize": Encoded,
    "/detokenize": Decoded,
    "/kvkeep/evict": Evicted,
    "/flush_cache": Flushed,
    "/abort_request": AbortCount,
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
    "/model_info": ServedModel,
    "/server_info": ServerSettings,
    "/version": Version,
    "/ping": State,
    "/health": State,
    "/ready": State,
    "/cache/explain/{name}": Explained,
}
"""By path. Answers may have more fields than these."""

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Once upon a time", "max_tokens": 8},
        {"prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "ignore_eos": True},
        {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, "logprobs": 2, "echo": True},
        {"prompt": "1 2 3", "max_tokens": 8, "stream": True, "cache_salt": "tenant-1"},
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Count"}]}],
            "max_tokens": 16,
            "logprobs": True,
            "top_logprobs": 3,
            "response_format": {"type": "json_object"},
        },
    ],
    "/v1/messages": [
        {"max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]},
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "Hello"}]}],
    "/generate": [
        {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8}},
        {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True},
    ],
    "/tokenize": [{"prompt": "Once upon a time"}],
    "/detokenize": [{"tokens": [5, 6, 7, 8]}],
    "/kvkeep/evict": [{"tier": "device"}],
    "/abort_request": [{"rid": "request-1"}],
}
"""Bodies of requests, by path."""

ERRORS = {
    400: "A field is wrong, or the body is no JSON",
    401: "The right key is missing",
    404: "There is no such model, request or path",
    408: "The body came too slowly",
    413: "The body is too large",
    429: "Too many requests wait",
    500: "A fault of the server; its log has more",
    503: "The engine does not answer, the server ends, or has too many connections",
    504: "The request's own deadline is over",
}
_OF_BODIES = (400, 408, 413)
_OF_GENERATION = (429, 504)

_EVENT = {  # of a stream; the last one is "[DONE]"
    "type": "object",
    "properties": {
        "data": {"type": "string", "description": "JSON, as in a whole answer's choices"}
    },
    "required": ["data"],
}
_TOKENS = ("prompt", "input_ids", "tokens", "stop_token_ids")  # fields with token ids


def describe(app: FastAPI, info: ModelInfo) -> None:
    """Make ``app`` answer ``/openapi.json`` with :func:`document`."""

    def made() -> dict[str, Any]:
        app.openapi_schema = app.openapi_schema or document(app, info)
        return app.openapi_schema

    app.openapi = made  # type: ignore[method-assign]


def document(app: FastAPI, info: ModelInfo) -> dict[str, Any]:
    """The document of ``app``, which serves the model ``info``."""
    found = get_openapi(
        title=app.title,
        version=app.version,
        description="OpenAI's and SGLang's APIs on a hierarchical KV cache.",
        routes=app.routes,
        tags=[{"name": name, "description": text} for name, text in TAGS.items()],
    )
    models: list[type[BaseModel]] = [*dict.fromkeys(ANSWERS.values()), Failure, AnthropicFailure]
    at = "#/components/schemas/{model}"
    of, definitions = models_json_schema(
        [(model, "serialization") for model in models], ref_template=at
    )
    schemas = found["components"]["schemas"]
    schemas |= definitions["$defs"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for schema in schemas.values():
        for name in _TOKENS:
            _bound(schema.get("properties", {}).get(name), info.vocab_size)
    found["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["example"] = info.name
    for path, methods in found["paths"].items():
        for operation in methods.values():
            answer = ANSWERS.get(path)
            _operation(path, operation, of[answer, "serialization"] if answer else None)
    return found


def _operation(path: str, operation: dict[str, Any], answer: dict[str, Any] | None) -> None:
    """Say what one endpoint answers, and show what it may be asked."""
    body = operation.get("requestBody")
    generates = "generate" in operation["tags"]
    responses = operation["responses"]
    responses.pop("422", None)
    good = responses["200"]["content"]
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif answer:
        several = {"anyOf": [answer, {"type": "array", "items": answer}]}
        good["application/json"]["schema"] = several if path == "/generate" else answer
    if generates:
        good["text/event-stream"] = {"schema": _EVENT}
    if body:
        content = body["content"]["application/json"]
        if examples := EXAMPLES.get(path):
            content["examples"] = {
                f"example-{number}": {"value": value} for number, value in enumerate(examples, 1)
            }
    failure = AnthropicFailure if path.startswith("/v1/messages") else Failure
    for status, text in ERRORS.items():
        if (status in _OF_BODIES and not body) or (status in _OF_GENERATION and not generates):
            continue
        schema = {"$ref": f"#/components/schemas/{failure.__name__}"}
        responses[str(status)] = {
            "description": text,
            "content": {"application/json": {"schema": schema}},
        }


def _bound(schema: Any, vocabulary: int) -> None:
    """Let integers in ``schema`` be token ids."""
    match schema:
        case {"type": "integer"}:
            schema |= {"minimum": 0, "maximum": vocabulary - 1}
        case {"type": "array", "items": inner}:
            _bound(inner, vocabulary)
        case {"anyOf": several}:
            for each in several:
                _bound(each, vocabulary)
