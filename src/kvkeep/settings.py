"""Settings. Each is described once, beside its field; flags, files and checks read it there.

A settings class is a frozen dataclass whose fields are made by :func:`setting`, and which calls
:func:`check` in ``__post_init__``. It may hold another one: its settings then count as its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from fractions import Fraction
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from .schema import ConfigError

SERVER, REQUESTS = "Server", "Requests"
MEMORY, STORAGE, SPECULATION = "Memory", "Storage", "Speculation"
"""Panels of the help."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that an operator may choose: its field, what is allowed, and what help says."""

    name: str  # the field's
    kind: type  # int, float, bool, str or Path
    optional: bool  # None is a value, too
    default: Any  # MISSING: there is none
    panel: str
    help: str
    flags: tuple[str, ...]  # on the command line; SGLang's name first, where it has one
    choices: Collection[str]  # empty: any
    least: float | None  # the lower bound, if it is allowed itself, ...
    above: float | None  # ... and if it is not
    most: float | None  # the upper bound, if it is allowed itself, ...
    below: float | None  # ... and if it is not
    secret: bool  # shown to nobody
    unit: int  # what an operator's 1 is in the field: 1 << 30 where bytes are written in GiB

    @property
    def written(self) -> type:
        """The type of what an operator writes."""
        return self.kind if self.unit == 1 else float

    @property
    def shown(self) -> Any:
        """The default as an operator would write it; None: there is none, or none to show."""
        if self.default in (None, MISSING):
            return None
        return self.default if self.unit == 1 else self.default / self.unit

    def read(self, value: Any, name: str) -> Any:
        """The field's value for ``value``, which an operator wrote under ``name``.

        Raises:
            ConfigError: the setting cannot have it.
        """
        if self.kind is Path and isinstance(value, str):
            value = Path(value)
        self._check(value, self.written, name)
        return value if value is None or self.unit == 1 else round(Fraction(value) * self.unit)

    def check(self, value: Any) -> None:
        """Raise :class:`~kvkeep.schema.ConfigError` if the field cannot have this value."""
        self._check(value, self.kind, self.name)

    def _check(self, value: Any, kind: type, name: str) -> None:
        if value is None and self.optional:
            return
        fits, words = _KINDS[kind]
        if not fits(value):
            raise ConfigError(f"{name} must be {words}, not {value!r}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{name} must be one of {', '.join(self.choices)}, not {value!r}")
        if (
            (self.least is not None and value < self.least)
            or (self.above is not None and value <= self.above)
            or (self.most is not None and value > self.most)
            or (self.below is not None and value >= self.below)
        ):
            raise ConfigError(f"{name} must be {self._range()}, not {value!r}")

    def _range(self) -> str:
        """In words."""
        if self.least is not None and self.least == self.most:
            return f"{self.least}"
        if self.most is None and self.below is None:
            return f"above {self.above}" if self.least is None else f"at least {self.least}"
        if self.least is None and self.above is None:
            return f"below {self.below}" if self.most is None else f"at most {self.most}"
        low = f"({self.above}" if self.least is None else f"[{self.least}"
        high = f"{self.below})" if self.most is None else f"{self.most}]"
        return f"in {low}, {high}"


def _number(kind: type[Integral] | type[Real]) -> Callable[[Any], bool]:
    """Whether a value is one; True and False, infinity and NaN are not."""
    return lambda x: isinstance(x, kind) and not isinstance(x, bool) and math.isfinite(x)


_KINDS: dict[type, tuple[Callable[[Any], bool], str]] = {
    int: (_number(Integral), "a whole number"),
    float: (_number(Real), "a number"),
    bool: (lambda x: isinstance(x, bool), "true or false"),
    str: (lambda x: isinstance(x, str), "text"),
    Path: (lambda x: isinstance(x, Path), "a path"),
}


def described(
    panel: str,
    text: str,
    *flags: str,
    choices: Collection[str] = (),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    secret: bool = False,
    unit: int = 1,
) -> dict[str, Any]:
    """Metadata of a field without a default; the arguments are as in :class:`Setting`.

    A setting without ``flags`` has one of its field's name.
    """
    return {
        "panel": panel, "help": text, "flags": flags, "choices": choices, "unit": unit,
        "secret": secret, "least": least, "above": above, "most": most, "below": below,
    }  # fmt: skip


def setting(default: T, panel: str, text: str, *flags: str, **more: Any) -> T:
    """A field with a default; the other arguments are those of :func:`described`."""
    made: T = field(
        default=default,
        metadata=described(panel, text, *flags, **more),
        repr=not more.get("secret", False),
    )
    return made


def _find(kind: type) -> tuple[Setting, ...]:
    """The settings of a class itself."""
    hints = get_type_hints(kind)
    found = []
    for one in fields(kind):
        if one.metadata:
            types = get_args(hints[one.name]) or (hints[one.name],)
            said = {**one.metadata, "flags": one.metadata["flags"] or (flag(one.name),)}
            optional = type(None) in types
            found.append(Setting(one.name, types[0], optional, one.default, **said))
    return tuple(found)


_own: Callable[[type], tuple[Setting, ...]] = cache(_find)


def _within(kind: type) -> dict[str, type]:
    """The settings classes that a class holds, by field."""
    hints = get_type_hints(kind)
    return {x.name: hints[x.name] for x in fields(kind) if is_dataclass(hints[x.name])}


def settings_of(kind: type) -> tuple[Setting, ...]:
    """All settings of a class, those of the classes within it included."""
    within = (settings_of(inner) for inner in _within(kind).values())
    return sum(within, start=_own(kind))


def flag(name: str) -> str:
    """As an option on the command line."""
    return f"--{name.replace('_', '-')}"


def written(config: Any) -> dict[str, Any]:
    """All settings of ``config`` as an operator would write them, by flag: ``page_size``.

    Secrets are left out, paths are text.
    """
    values = {}
    for one in _own(type(config)):
        value = getattr(config, one.name)
        if value is not None and one.unit != 1:
            value /= one.unit
        if not one.secret:
            name = one.flags[0].removeprefix("--").replace("-", "_")
            values[name] = str(value) if isinstance(value, Path) else value
    for name in _within(type(config)):
        values |= written(getattr(config, name))
    return values


def check(config: Any) -> None:
    """Check every setting of a settings class itself.

    Raises:
        ConfigError: a field has a value that its setting cannot have.
    """
    for one in _own(type(config)):
        one.check(getattr(config, one.name))


def make(kind: type[T], values: Mapping[str, Any]) -> T:
    """A ``kind`` with these values, by field; each goes to the class whose setting it is.

    Raises:
        ConfigError: a value is not allowed, a setting has neither value nor default, or there is no
            setting of that name.
    """
    known = settings_of(kind)
    if unknown := values.keys() - {one.name for one in known}:
        raise ConfigError(f"there is no setting {', '.join(sorted(unknown))}")
    for one in known:
        if one.default is MISSING and one.name not in values:
            raise ConfigError(f"{one.name} is missing: {one.flags[0]} sets it")
    inner: dict[str, Any] = {
        name: make(held, _for(held, values)) for name, held in _within(kind).items()
    }
    return kind(**inner, **{x.name: values[x.name] for x in _own(kind) if x.name in values})


def _for(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {x.name: values[x.name] for x in settings_of(kind) if x.name in values}
