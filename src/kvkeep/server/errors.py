"""Turns errors into OpenAI's format: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import http
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ..engine.errors import DeadlineExceeded, Overloaded
from ..schema import Closed, KvkeepError, ModelNotFound, PromptTooLong, RequestError
from .fields import REFUSED
from .protocol import ChatRequest, CompletionRequest

_FIELDS = CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys()


ID_HEADER = "x-request-id"


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """The HTTP status and response body for ``error``."""
    message = str(error)
    first = message.split(" ", 1)[0]  # by convention the parameter's name, if there is one
    match error:
        case ModelNotFound():
            return 404, _body(message, param="model", code="model_not_found")
        case PromptTooLong():
            return 400, _body(message, param="prompt", code="context_length_exceeded")
        case RequestError():
            return 400, _body(message, param=first if first in _FIELDS else None)
        case Overloaded():
            return 429, _body(message, kind="rate_limit_error", code="overloaded")
        case DeadlineExceeded():
            return 504, _body(message, kind="timeout_error", code="deadline_exceeded")
        case Closed():
            return 503, _body(message or "the engine is closed", kind="server_error")
        case KvkeepError():
            return 500, _body(message, kind="server_error", code=type(error).__name__)
        case _:
            return 500, _body("internal error; see the server's log", kind="server_error")


def install(app: FastAPI) -> None:
    """Install exception handlers in ``app`` so that every error response has this format."""

    @app.exception_handler(KvkeepError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Response:
        status, body = describe(error)
        # middleware, which adds this header to others, does not see the response to an Exception
        headers = {ID_HEADER: request.scope["state"]["request_id"]}
        retry = {"Retry-After": "1"} if status == 429 else {}
        return _json(request, status, body, headers | retry)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _json(request, 400, _invalid(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        what = error.detail
        if what == http.HTTPStatus(error.status_code).phrase:  # no detail: name the endpoint
            what = f"{request.method} {request.url.path}: {what}"
        return _json(request, error.status_code, _body(what), error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # never sent: the client is gone


def in_anthropics_schema(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """An error's ``body`` as Anthropic's API has it."""
    kinds = {
        401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
        429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
    }  # fmt: skip
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": body["error"]["message"]}}


def unauthorized(request: Request) -> Response:
    """The response to a request without the right key."""
    body = _body("this needs the right key: Authorization: Bearer KEY", code="invalid_api_key")
    return _json(request, 401, body, {"WWW-Authenticate": "Bearer"})


def crowded(request: Request, most: int) -> Response:
    """The response on a connection that is one too many."""
    message = f"the server has {most} connections; --max-connections allows more"
    body = _body(message, kind="server_error", code="too_many_connections")
    return _json(request, 503, body, {"Retry-After": "1", "Connection": "close"})


def raw(message: str) -> bytes:
    """The body of a response to what is no request."""
    return json.dumps(_body(message)).encode()


def _json(
    request: Request, status: int, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    if request.url.path.startswith("/v1/messages"):
        body = in_anthropics_schema(status, body)
    # ASCII only, because a message may quote text that is not valid Unicode
    return Response(json.dumps(body), status, headers, media_type="application/json")


def _invalid(errors: list[dict[str, Any]]) -> dict[str, Any]:
    """The error body for the first invalid field in pydantic's ``errors``."""
    if errors[0]["type"] == "json_invalid":
        return _body(f"the body is not valid JSON: {errors[0]['ctx']['error']}")
    if errors[0]["type"] == REFUSED:
        return _body(errors[0]["msg"], param=errors[0]["ctx"]["param"])
    if len(errors[0]["loc"]) < 2:
        return _body("the body must be a JSON object, sent with Content-Type: application/json")
    param = str(errors[0]["loc"][1])
    if errors[0]["type"] == "extra_forbidden" and len(errors[0]["loc"]) == 2:
        return _body(f"{param} is not a parameter of this endpoint", param=param)
    # a field that may have several types has one error for each
    reasons = [_reason(e) for e in errors if str(e["loc"][1]) == param]
    return _body(f"{param}: " + ", or ".join(dict.fromkeys(reasons)), param=param)


def _reason(error: dict[str, Any]) -> str:
    inner = ".".join(str(part) for part in error["loc"][2:])
    return f"{error['msg']} ({inner})" if inner else str(error["msg"])


def _body(
    message: str,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
