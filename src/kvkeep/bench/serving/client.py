"""A client of OpenAI's API that notes when each event of an answer arrives."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec

from ...schema import ConfigError
from .answers import Answer, Failure, Gathered, message_of, read_body
from .events import events

LEFT = "left"
"""Kind of failure of a request whose client hung up."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
clock = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and how every request to it is put."""

    base_url: str = "http://127.0.0.1:30000"
    model: str = ""  # empty: the first that the server lists
    api_key: str = field(default="", repr=False)
    stream: bool = True
    temperature: float = 0.0
    ignore_eos: bool = True  # answers have the length that was asked for
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # more fields; they win
    timeout: float = 3600.0  # seconds of silence that fail a request
    reuse: bool = True  # False: each request has a connection of its own

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"--base-url {self.base_url!r}: {error}") from None
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:
            raise ConfigError(f"--base-url must be http://HOST:PORT, not {self.base_url!r}")

    @property
    def root(self) -> str:
        """The URL without ``/v1``, which clients of OpenAI's often write behind it."""
        return self.base_url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Call:
    """A request to send."""

    content: Mapping[str, Any]  # its "prompt" or "messages", and what else is its own
    max_tokens: int
    prompt_tokens: int | None = None  # of the prompt, if known
    patience: float | None = None  # seconds after which the client hangs up; None: it never does

    @property
    def path(self) -> str:
        return CHAT if "messages" in self.content else COMPLETIONS


class Client:
    """Sends requests. One per event loop; any number of requests at a time.

    Each request that runs has a transport, with one connection, to itself. httpx's own pool looks
    at all of its connections at each request: with 64 of them that took as long as the rest.
    """

    def __init__(self, target: Target, http: httpx.AsyncClient, verify: ssl.SSLContext) -> None:
        self.target = target
        self._http = http
        self._verify = verify
        self._urls = {path: httpx.URL(target.root + path) for path in (COMPLETIONS, CHAT)}
        self._extensions = {"timeout": httpx.Timeout(target.timeout).as_dict()}
        self._transports: list[httpx.AsyncHTTPTransport] = []
        self._idle: list[httpx.AsyncHTTPTransport] = []  # the last was used last
        self._fields: dict[str, Any] = {
            "model": target.model,
            "temperature": target.temperature,
            "stream": target.stream,
        }
        if target.stream:
            self._fields["stream_options"] = {"include_usage": True}
        if target.ignore_eos:  # not OpenAI's: a server that refuses it must not see it
            self._fields["ignore_eos"] = True

    async def send(self, call: Call) -> Answer:
        """Send ``call`` and read its answer. A failure is an answer, too; see ``Answer.error``."""
        own = {**call.content, "max_tokens": call.max_tokens}
        body = msgspec.json.encode(self._fields | own | dict(self.target.extra_body))
        gathered = Gathered(clock())
        try:
            async with asyncio.timeout(call.patience):
                await self._exchange(call.path, body, gathered)
            gathered.check_finished()
        except TimeoutError:
            return gathered.failed(Failure(LEFT, "the client hung up"), clock())
        except Failure as failure:
            return gathered.failed(failure, clock())
        except httpx.HTTPError as error:
            return gathered.failed(Failure(type(error).__name__, str(error)), clock())
        except msgspec.MsgspecError as error:
            return gathered.failed(Failure("not understood", str(error)), clock())
        return gathered.answer(self.target.stream, call.prompt_tokens)

    async def _exchange(self, path: str, body: bytes, gathered: Gathered) -> None:
        request = httpx.Request(
            "POST",
            self._urls[path],
            headers=self._http.headers,
            content=body,
            extensions=self._extensions,
        )
        transport = self._idle.pop() if self._idle else self._connect()
        try:
            async with aclosing(await transport.handle_async_request(request)) as response:
                await self._read(response, gathered)
        finally:
            if self.target.reuse:
                self._idle.append(transport)
            else:
                self._transports.remove(transport)
                await transport.aclose()

    def _connect(self) -> httpx.AsyncHTTPTransport:
        # Idle connections end before servers end theirs (uvicorn: after 5 s), which would fail the
        # request that is just being sent.
        limits = httpx.Limits(keepalive_expiry=2.0)
        self._transports.append(httpx.AsyncHTTPTransport(verify=self._verify, limits=limits))
        return self._transports[-1]

    async def _read(self, response: httpx.Response, gathered: Gathered) -> None:
        if not response.is_success:
            text = (await response.aread()).decode(errors="replace")
            raise Failure(f"HTTP {response.status_code}", _explained(text))
        if self.target.stream:
            async for event in events(response.aiter_bytes()):
                gathered.take(read_body(event), clock())
        else:
            gathered.take(read_body(await response.aread()), clock())

    async def get(self, path: str) -> str:
        """The body at ``path``; empty if the server has none there."""
        try:
            response = await self._http.get(path)
        except httpx.HTTPError:
            return ""
        return response.text if response.is_success else ""

    async def close(self) -> None:
        """Close all connections."""
        for transport in self._transports:
            await transport.aclose()

    async def post(self, path: str, body: Mapping[str, Any]) -> int:
        """The HTTP status of an administrative request.

        Raises:
            ConfigError: the server does not answer.
        """
        try:
            return (await self._http.post(path, json=dict(body))).status_code
        except httpx.HTTPError as error:
            raise ConfigError(_unreachable(self.target, error)) from None


@asynccontextmanager
async def connected(target: Target) -> AsyncGenerator[Client, None]:
    """A client of ``target``, whose model it asks for if ``target`` names none.

    Proxies that the environment names are not used: a benchmark would measure them.

    Raises:
        ConfigError: the server does not answer, or lists no model.
    """
    headers = {"accept-encoding": "identity", "content-type": "application/json"}
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
    verify = httpx.create_ssl_context(trust_env=False)
    async with httpx.AsyncClient(
        base_url=target.root,
        headers=headers,
        timeout=target.timeout,
        verify=verify,
        trust_env=False,
    ) as http:
        if not target.model:
            target = replace(target, model=await _first_model(target, http))
        client = Client(target, http, verify)
        try:
            yield client
        finally:
            await client.close()


async def _first_model(target: Target, http: httpx.AsyncClient) -> str:
    try:
        response = await http.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        said = f"HTTP {error.response.status_code}: {_explained(error.response.text)}"
        raise ConfigError(f"{target.root}/v1/models: {said}") from None
    except httpx.HTTPError as error:
        raise ConfigError(_unreachable(target, error)) from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{target.root}/v1/models lists no model; --model names one") from None


def _unreachable(target: Target, error: Exception) -> str:
    return f"{target.root} does not answer: {error or type(error).__name__}"


def _explained(text: str) -> str:
    """What the body of an error response says."""
    try:
        return message_of(msgspec.json.decode(text))
    except msgspec.MsgspecError:
        return message_of(text)
