"""The choices of a chat: text to messages and their streamed parts."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .logprobs import Spell
from .speech import Dialect, Part, Speech
from .tool_formats import Format

_DIGITS = string.ascii_letters + string.digits


@dataclass(slots=True)
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: list[str] = field(default_factory=list)  # JSON in pieces
    broken: bool = False  # it is none after all


class Said:
    """All that one answer said so far, and how many of its tokens were reasoning."""

    def __init__(self, dialect: Dialect, spell: Spell) -> None:
        self.speech = Speech(dialect)
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.begun: list[Call] = []
        self.reasoning_tokens = 0
        self._format, self._spell = dialect.format, spell
        self._tokens, self._counting = 0, True

    def push(self, text: str, tokens: Sequence[int]) -> list[Part]:
        """The parts that ``text``, of ``tokens``, completes."""
        return self._add(self._counted(self.speech.push(text), tokens))

    def finish(self) -> list[Part]:
        """The last parts."""
        return self._add(self.speech.finish())

    @property
    def calls(self) -> list[Call]:
        """Those that are none left out."""
        return [call for call in self.begun if not call.broken]

    def reason(self, engine: str) -> str:
        """Why it ended, in OpenAI's words."""
        return "tool_calls" if engine == "stop" and self.speech.calls else engine

    def _add(self, parts: list[Part]) -> list[Part]:
        for part in parts:
            match part.kind:
                case "content":
                    self.content.append(part.text)
                case "reasoning":
                    self.reasoning.append(part.text)
                case "name":
                    self.begun.append(Call(_new_id(self._format), part.text))
                case "arguments":
                    self.begun[part.call].arguments.append(part.text)
                case "broken":
                    self.begun[part.call].broken = True
        return parts

    def _counted(self, parts: list[Part], tokens: Sequence[int]) -> list[Part]:
        speech = self.speech
        self._tokens += len(tokens)
        if speech.reasoning:
            self.reasoning_tokens = self._tokens
        elif speech.thought and self._counting:  # it ended in this text
            self._counting, beyond = False, speech.beyond
            self.reasoning_tokens = self._tokens
            for token in reversed(tokens):
                beyond -= len(self._spell(token))
                if beyond < 0:
                    break
                self.reasoning_tokens -= 1
        return parts


def _new_id(form: Format | None) -> str:
    prefix, digits = (form.id_prefix, form.id_digits) if form else ("", 0)
    return prefix + "".join(secrets.choice(_DIGITS) for _ in range(digits))


class ChatVoice:
    """A choice of a chat.

    Args:
        stream_reasoning: False: a stream has it in one piece.
    """

    def __init__(self, dialect: Dialect, spell: Spell, stream_reasoning: bool) -> None:
        self._said, self._stream_reasoning = Said(dialect, spell), stream_reasoning
        self._held = ""

    def push(self, text: str, tokens: Sequence[int]) -> list[dict[str, Any]]:
        return self._deltas(self._said.push(text, tokens))

    def finish(self) -> list[dict[str, Any]]:
        return self._deltas(self._said.finish()) + self._release()

    def whole(self) -> dict[str, Any]:
        content, reasoning = "".join(self._said.content), "".join(self._said.reasoning)
        calls = [
            {"id": call.id, "type": "function", "function": _function(call)}
            for call in self._said.calls
        ]
        said = {"role": "assistant", "content": None if calls and not content else content}
        said |= {"refusal": None} | ({"reasoning_content": reasoning} if reasoning else {})
        return {"message": said | ({"tool_calls": calls} if calls else {})}

    def reason(self, engine: str) -> str:
        return self._said.reason(engine)

    def details(self) -> dict[str, int]:
        return {"reasoning_tokens": self._said.reasoning_tokens}

    def _deltas(self, parts: list[Part]) -> list[dict[str, Any]]:
        deltas = []
        for part in parts:
            match part.kind:
                case "content":
                    deltas += [*self._release(), {"delta": {"content": part.text}}]
                case "reasoning":
                    self._held += part.text
                    deltas += self._release() if self._stream_reasoning else []
                case "name":
                    call = self._said.begun[part.call]
                    new = {"id": call.id, "type": "function"}
                    function = {"name": call.name, "arguments": ""}
                    deltas += [*self._release(), _delta(part, new | {"function": function})]
                case "arguments":
                    deltas.append(_delta(part, {"function": {"arguments": part.text}}))
        return deltas

    def _release(self) -> list[dict[str, Any]]:
        """Reasoning that was held back."""
        held, self._held = self._held, ""
        return [{"delta": {"reasoning_content": held}}] if held else []


def _function(call: Call) -> dict[str, str]:
    return {"name": call.name, "arguments": "".join(call.arguments)}


def _delta(part: Part, fields: dict[str, Any]) -> dict[str, Any]:
    return {"delta": {"tool_calls": [{"index": part.call} | fields]}}
