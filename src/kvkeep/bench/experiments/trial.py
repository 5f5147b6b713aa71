"""What the experiments share: servers, requests, progress, and claims that hold or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ...demo.process import Server
from ...output import write_json
from ..machine import machine
from ..serving.answers import Answer
from ..serving.client import Call, Target, connected
from ..serving.running import Outputs, offer
from ..serving.show import console

Start = Callable[..., list[Server]]
Tell = Callable[[str, int], None]
"""Says what is done now, and how many steps have been done since the last call."""

SILENCE = 600.0  # seconds without a byte that fail a request


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence with the figures in it."""

    words: str
    holds: bool


def conclude(
    name: str,
    setting: Mapping[str, Any],
    figures: Mapping[str, Any],
    claims: Sequence[Claim],
    outputs: Outputs,
) -> bool:
    """Print the claims and write the JSON, if wanted; return whether all hold."""
    out = console()
    for claim in claims:
        verdict = "[green]holds[/]" if claim.holds else "[red]FAILS[/]"
        out.print(f"{verdict}  {claim.words}", highlight=False, soft_wrap=True)
    if outputs.json is not None:
        said = [{"claim": claim.words, "holds": claim.holds} for claim in claims]
        head = {"kind": f"experiment {name}", "setting": dict(setting), "claims": said}
        write_json(outputs.json, head | dict(figures) | {"machine": machine()})
    return all(claim.holds for claim in claims)


@contextmanager
def servers() -> Iterator[Start]:
    """A function that starts a server for each list of arguments, and waits until all are ready.

    Its ``program`` is that of :class:`~kvkeep.demo.process.Server`.

    Leaving the block stops those that still run.
    """
    with ExitStack() as stack:

        def start(
            *arguments: list[str], program: Sequence[str] = ("kvkeep", "serve")
        ) -> list[Server]:
            started = [Server(one, program) for one in arguments]
            for server in started:
                stack.callback(server.stop)
            for server in started:
                server.wait()
            return started

        yield start


@contextmanager
def progress(total: int) -> Iterator[Tell]:
    """A bar on stderr."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("starting servers", total=total)

        def tell(what: str, steps: int = 0) -> None:
            bar.update(task, description=what, advance=steps)

        yield tell


def target(server: Server, stream: bool = True) -> Target:
    """How requests are put to ``server``."""
    return Target(base_url=server.url, stream=stream, timeout=SILENCE)


def answers(server: Server, calls: Sequence[Call], most: int) -> list[Answer]:
    """The answers to ``calls``, in their order; at most ``most`` run at a time."""
    found: dict[int, Answer] = {}

    async def ask() -> None:
        async with connected(target(server)) as client:
            await offer(calls, [0.0] * len(calls), most, client.send, found.__setitem__)

    asyncio.run(ask())
    return [found[at] for at in range(len(calls))]


def flags(**values: object) -> list[str]:
    """Options by name: ``storage_dir=x`` is ``--storage-dir x``."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in values.items()]
    return [word for pair in pairs for word in pair]
