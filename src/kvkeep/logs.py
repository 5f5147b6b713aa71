"""Log lines, as text or as JSON objects. Each has the id of the HTTP request that it is about."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NamedTuple

request: ContextVar[str] = ContextVar("request id", default="-")
"""The request that this task works on; "-": none."""


class Choice(NamedTuple):
    """What is logged, and how."""

    level: int | str = logging.WARNING  # of kvkeep's own lines
    form: str = "text"  # one of FORMS


_choice = Choice()


def configure(choice: Choice) -> None:
    """Log to stderr as ``choice`` says. A process that has handlers of its own keeps them."""
    global _choice
    _choice = choice
    handler = logging.StreamHandler()
    handler.setFormatter(FORMS[choice.form])
    handler.addFilter(_name)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("kvkeep").setLevel(choice.level)


def chosen() -> Choice:
    """What :func:`configure` got, for another process; the level as it is now."""
    return _choice._replace(level=logging.getLogger("kvkeep").getEffectiveLevel())


def note(logger: logging.Logger, event: str, fields: Mapping[str, Any]) -> None:
    """Log an event at ``info``: in text as ``event: name=value ...``, in JSON with these fields."""
    logger.info(event, extra={"fields": fields})


def say(line: str) -> None:
    """Tell whoever started the process, whatever the level."""
    if _choice.form == "json":
        line = FORMS["json"].format(
            logging.makeLogRecord({"name": "kvkeep", "levelname": "INFO", "msg": line})
        )
    else:
        line = f"kvkeep: {line}"
    print(line, file=sys.stderr, flush=True)


def _name(record: logging.LogRecord) -> bool:
    record.request = request.get()
    return True


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        text = super().formatMessage(record)
        if fields := getattr(record, "fields", None):
            text += ": " + " ".join(f"{name}={value}" for name, value in fields.items())
        return text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (name := getattr(record, "request", "-")) != "-":
            said["request"] = name
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said | dict(getattr(record, "fields", {})), default=str)


FORMS: dict[str, logging.Formatter] = {
    "text": _Text("%(levelname)s:%(name)s:%(request)s: %(message)s"),
    "json": _Json(),
}
"""How lines may look."""
