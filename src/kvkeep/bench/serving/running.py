"""What the benchmarks of servers share: arrivals, progress, interruption and files."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ...output import writable, write_json, write_json_lines
from ...schema import ConfigError
from ..machine import machine
from ..plot import drawable
from .answers import Answer
from .client import Call, Target, clock

Send = Callable[[Call], Awaitable[Answer]]
Done = Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a run's figures go, besides the console."""

    json: Path | None = None  # all figures, the settings and the machine
    lines: Path | None = None  # a JSON object per request or per round
    plot: Path | None = None
    tag: str = ""  # names the run in reports

    def check(self) -> None:
        """Raise ConfigError, before any work is done, unless all can be written."""
        for file in (self.json, self.lines):
            if file is not None:
                writable(file)
        if self.plot is not None:
            drawable(self.plot)

    def write(
        self, kind: str, target: Target, setting: object, figures: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the JSON of a run, if wanted, and return it.

        Args:
            kind: of the run, which is what reports compare runs by.
            setting: a dataclass of the run's parameters.
        """
        run = {
            "kind": kind,
            "tag": self.tag,
            "base_url": target.root,
            "model": target.model,
            "request": {
                "stream": target.stream,
                "temperature": target.temperature,
                "ignore_eos": target.ignore_eos,
                "extra_body": target.extra_body,
            },
            "setting": _writable(setting),
            **figures,
        }
        if self.json is not None:  # the machine last: finding out takes seconds
            write_json(self.json, run | {"machine": machine()})
        return run

    def write_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the JSON lines, if wanted."""
        if self.lines is not None:
            write_json_lines(self.lines, lines)


def _writable(setting: Any) -> dict[str, Any]:
    """Fields by name, as JSON knows them: it has neither paths nor infinity."""
    values = {name: getattr(setting, name) for name in setting.__slots__}
    return {
        name: value if isinstance(value, int | str | None) or _finite(value) else str(value)
        for name, value in values.items()
    }


def _finite(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def arrivals(count: int, rate: float, random: np.random.Generator) -> list[float]:
    """Seconds at which ``count`` requests are due: a Poisson process that starts at 0.

    Args:
        rate: mean requests per second; infinity: all are due at once.

    Raises:
        ConfigError: the rate is not above 0.
    """
    check_rate(rate)
    gaps = random.exponential(1 / rate, max(count - 1, 0))
    times: list[float] = np.concatenate(([0.0], np.cumsum(gaps)))[:count].tolist()
    return times


def check_rate(rate: float) -> None:
    """Raise ConfigError unless a rate of requests is above 0."""
    if not rate > 0:
        raise ConfigError(f"--request-rate must be above 0, not {rate:g}")


async def offer(
    calls: Sequence[Call],
    due: Sequence[float],
    most: int | None,
    send: Send,
    done: Callable[[int, Answer], None],
) -> None:
    """Send each of ``calls`` when it is due, whether or not earlier ones were answered.

    Args:
        due: seconds from now, ascending.
        most: requests that may run at a time; others wait, first come first served. None: any.
        done: is called with the index of each call and its answer.
    """
    room = asyncio.Semaphore(most or len(calls))
    begin = clock()

    async def one(index: int, call: Call) -> None:
        async with room:
            answer = await send(call)
        done(index, answer)

    async with asyncio.TaskGroup() as group:
        for index, (call, at) in enumerate(zip(calls, due, strict=True)):
            await until(begin + at)
            group.create_task(one(index, call))


async def until(moment: float) -> None:
    """Sleep until then, by the client's clock."""
    if (seconds := moment - clock()) > 0:
        await asyncio.sleep(seconds)


def finished(work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work`` to its end; False: Ctrl-C cut it short, and what it recorded until then counts.

    The first error of a task group is raised alone: that is what the user can correct.
    """
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        return False
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return True


@contextmanager
def progress(total: int, what: str) -> Iterator[Done]:
    """A bar on stderr, which the yielded function advances by one answer."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    failed = 0
    # Drawing takes time from the client: twice a second is enough to look at.
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("", total=total, failed="")

        def done(answer: Answer) -> None:
            nonlocal failed
            failed += bool(answer.error)
            bar.update(task, advance=1, failed=f"{failed} failed" if failed else "")

        yield done


def exit_code(whole: bool, completed: int) -> int:
    """Of the command: 130 if it was interrupted, 1 if no request succeeded, otherwise 0."""
    return 130 if not whole else 0 if completed else 1
