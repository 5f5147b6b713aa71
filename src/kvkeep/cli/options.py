"""Options of commands, made from settings; and the files that settings may be read from."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
import yaml

from ..schema import ConfigError
from ..settings import Setting


def with_options(command: Callable[..., None], settings: Sequence[Setting]) -> Callable[..., None]:
    """``command``, whose ``**said`` becomes an option for each setting.

    ``said`` has the values of options that were given, by field; others are left out. An error
    about one names the flag that was typed.
    """

    def run(context: typer.Context, **values: Any) -> None:
        typed = {word.split("=", 1)[0] for word in context.meta.get(WORDS, ())}
        for one in settings:
            source = context.get_parameter_source(one.name)
            if source is None or source.name != "COMMANDLINE":
                del values[one.name]
            else:
                flag = next((name for name in one.flags if name in typed), one.flags[0])
                values[one.name] = one.read(values[one.name], flag)
        command(**values)

    own = inspect.signature(command, eval_str=True).parameters.values()
    context = inspect.Parameter("context", _KEYWORD, annotation=typer.Context)
    kept = [each.replace(kind=_KEYWORD) for each in own if each.kind is not _VARIOUS]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [context, *kept, *map(_option, settings)]
    )
    run.__doc__ = command.__doc__
    return run


WORDS = "kvkeep.words"
"""Where a context's ``meta`` has the words of the command line."""

_KEYWORD, _VARIOUS = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD


def _option(one: Setting) -> inspect.Parameter:
    """As a parameter of a typer command."""
    choices = f" Choices: {', '.join(one.choices)}." if one.choices else ""
    option = typer.Option(one.shown, *one.flags, help=one.help + choices, rich_help_panel=one.panel)
    return inspect.Parameter(one.name, _KEYWORD, default=option, annotation=one.written | None)


def chosen(
    settings: Sequence[Setting], said: Mapping[str, Any], file: Path | None = None
) -> dict[str, Any]:
    """Values by field: ``said`` by options, and for the rest what ``file`` says.

    Raises:
        ConfigError: the file cannot be read, or a value in it is not allowed.
    """
    return (_read(file, settings) if file else {}) | dict(said)


def _read(file: Path, settings: Sequence[Setting]) -> dict[str, Any]:
    """Values by field from a YAML or TOML file, whose keys are options without their dashes.

    Raises:
        ConfigError: it cannot be read, a key is unknown or said twice, or a value is not allowed.
    """
    known = {name.removeprefix("--"): one for one in settings for name in one.flags}
    values: dict[str, Any] = {}
    for key, value in _parse(file).items():
        one = known.get(str(key).replace("_", "-"))
        if one is None:
            near = get_close_matches(str(key).replace("_", "-"), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{file}: there is no setting {key!r}{hint}")
        if one.name in values:
            raise ConfigError(f"{file}: {key} is set twice, here under another name")
        values[one.name] = one.read(value, f"{file}: {key}")
    return values


def _parse(file: Path) -> Mapping[str, Any]:
    parse = {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    if file.suffix not in parse:
        raise ConfigError(f"{file}: the name of a settings file ends in {', '.join(parse)}")
    try:
        found = parse[file.suffix](file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{file}: not {file.suffix[1:].upper()}: {reason}") from error
    if found is None:  # an empty YAML file
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: not a mapping of settings to values")
    return found
