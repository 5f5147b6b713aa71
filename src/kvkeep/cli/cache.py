"""``kvkeep cache``: commands on a storage directory, and on what a server cached."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..stores.file import FileStore

app = typer.Typer(no_args_is_help=True, help="Look after a storage directory.")

DIRECTORY = Annotated[Path, typer.Argument(metavar="DIR", help="A --hicache-storage-dir.")]


@contextmanager
def stored(directory: Path) -> Iterator[FileStore]:
    """The store in ``directory``, which must be one: looking must not make it so."""
    from ..schema import ConfigError
    from ..stores.file import FileStore

    if not any(directory.glob("*.slab")):
        raise ConfigError(f"there is no cache in {directory}")
    with closing(FileStore(directory, {})) as store:
        yield store


@app.command()
def ls(directory: DIRECTORY) -> None:
    """List the groups of records, the least recently used first."""
    rows = [("model", "group", "records", "tokens", "on disk", "written", "open")]
    with stored(directory) as store:
        for group in store.usage():
            name, kind, tokens = group.fingerprint.hex(), "?", "?"
            if label := group.label:
                name, kind = label.model, label.group
                tokens = f"{group.records * label.page_tokens:,}"
            held, is_open = mebibytes(group.bytes), "yes" if group.open else "no"
            rows.append(
                (name, kind, f"{group.records:,}", tokens, held, ago(group.written), is_open)
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # whole names, however narrow the screen is
        typer.echo("  ".join(map(str.ljust, row, widths)).rstrip())


@app.command()
def du(directory: DIRECTORY) -> None:
    """Tell how much there is in all."""
    with stored(directory) as store:
        groups = store.usage()
    held, records = sum(g.bytes for g in groups), sum(g.records for g in groups)
    typer.echo(f"{mebibytes(held)} on disk, {records} records of {len(groups)} groups")


@app.command()
def fsck(
    directory: DIRECTORY,
    repair: Annotated[bool, typer.Option("--repair", help="Forget what does not verify.")] = False,
) -> None:
    """Read and verify every record; servers may go on. Exit code 1 if any is bad."""
    with stored(directory) as store:
        report = store.fsck(repair)
    typer.echo(
        f"{report.good} good, {report.corrupt} corrupt, {report.orphaned} orphaned, "
        f"{report.missing} missing, {report.writing} being written"
    )
    if report.corrupt or report.orphaned or report.missing:
        raise typer.Exit(0 if repair else 1)


@app.command()
def gc(
    directory: DIRECTORY,
    keep: Annotated[float, typer.Option(help="GiB that may stay.")],
) -> None:
    """Delete the least recently used records until no more than --keep are left."""
    from ..engine.config import GIB
    from ..schema import ConfigError

    if not (math.isfinite(keep) and keep >= 0):
        raise ConfigError(f"--keep must be a number of at least 0, not {keep}")
    with stored(directory) as store:
        freed = store.gc(round(Fraction(keep) * GIB))
    typer.echo(f"{mebibytes(freed)} freed")


@app.command()
def explain(
    name: Annotated[str, typer.Argument(metavar="ID", help="Of a recent request or response.")],
    base_url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:30000",
    api_key: Annotated[
        str | None, typer.Option(help="The server's key, if it has one.", envvar="KVKEEP_API_KEY")
    ] = None,
) -> None:
    """Tell where the prefix hit of a recent request came from, and what limited it."""
    import json
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.parse import quote
    from urllib.request import Request, urlopen

    from rich.console import Console
    from rich.table import Table

    from ..schema import ConfigError

    url = f"{base_url.rstrip('/')}/cache/explain/{quote(name, safe='')}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=30) as answer:
            found = json.load(answer)
    except HTTPError as error:
        try:
            reason = json.load(error)["error"]["message"]
        except (KeyError, TypeError, ValueError):  # another kind of server
            reason = f"{url}: {error.code} {error.reason}"
        raise ConfigError(reason) from None
    except (HTTPException, OSError, ValueError) as error:
        raise ConfigError(f"{url}: {getattr(error, 'reason', error)}") from None
    for one in found["requests"]:
        table = Table(show_header=False, box=None)
        for what, value in one.items():
            if what != "proposals":
                table.add_row(what, json.dumps(value))
        Console().print(table)


def ago(moment: float | None) -> str:
    """How long ago a ``time.time`` was, for people."""
    if moment is None:
        return "?"
    seconds = max(0.0, time.time() - moment)
    spans = ("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1)
    unit, length = next((one for one in spans if seconds >= 2 * one[1]), spans[-1])
    return f"{seconds / length:.0f} {unit} ago"


def mebibytes(count: int) -> str:
    """``count`` bytes, for people."""
    return f"{count / 2**20:,.1f} MiB"
