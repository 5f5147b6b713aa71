"""Tools in a chat's request, and calls in its history."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .limits import MOST_LEVELS, is_deeper

MOST_TOOLS = 1024  # of a request

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(BaseModel):
    """What a model may call. Unknown fields go to the chat template, as those of a tool do."""

    model_config = _STRICT

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON schema; None: there are none
    strict: bool | None = None  # True: arguments match the schema, however the call comes about


class Tool(BaseModel):
    """A tool of OpenAI's ``tools``."""

    model_config = _STRICT

    type: Literal["function"] = "function"
    function: Function

    def given(self) -> dict[str, Any]:
        """As the client sent it, for the chat template."""
        return {"type": self.type} | self.model_dump(exclude_unset=True)

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """A JSON schema."""
        return {"type": "object"} | (self.function.parameters or {"properties": {}})


class Named(BaseModel):
    """A function by its name."""

    model_config = _STRICT

    name: ToolName


class NamedTool(BaseModel):
    """A ``tool_choice`` of one function."""

    model_config = _STRICT

    type: Literal["function"] = "function"
    function: Named


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(BaseModel):
    """Name and arguments of a call."""

    model_config = _STRICT

    name: str
    arguments: str | dict[str, Any] = "{}"  # JSON; OpenAI's is a string


class ToolCall(BaseModel):
    """A call in an assistant's message."""

    model_config = _STRICT

    type: Literal["function"] = "function"
    function: CalledFunction

    def flat(self, as_objects: bool) -> dict[str, Any]:
        """As chat templates expect it.

        Args:
            as_objects: arguments are an object where they can be, else text.
        """
        dumped = {"type": self.type} | self.model_dump()
        given = self.function.arguments
        arguments = given if type(given) is not str or not as_objects else _object(given)
        if not as_objects and type(given) is dict:
            arguments = json.dumps(given, ensure_ascii=False)
        dumped["function"]["arguments"] = arguments
        return dumped


def _object(text: str) -> str | dict[str, Any]:
    """The JSON object in ``text``; ``text``, if there is none that a template can take."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if type(value) is dict and not is_deeper(value, MOST_LEVELS) else text
