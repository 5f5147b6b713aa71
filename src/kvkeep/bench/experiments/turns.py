"""``kvkeep bench experiment turns``: conversations with the tiers below the device on and off.

The load of ``kvkeep bench multiturn``, put on two servers: one has host memory and storage below
its device pool, the other the device pool alone. The servers take turns, round by round, so that
what slows the machine slows both, and only one of them works at a time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...demo.process import Server
from ...demo.run import SPECULATIVE, TARGET
from ..serving.answers import Answer
from ..serving.client import Call, connected
from ..serving.figures import per
from ..serving.multiturn import Conversations, Talks, Turn, round_figures
from ..serving.plots import draw, multiturn_panels
from ..serving.prompts import IdSource
from ..serving.running import Outputs, Send
from ..serving.show import console, number, print_rows
from .repeating import VOCABULARY
from .sibling import save_sibling
from .trial import Claim, Tell, conclude, progress, servers, target

ON, OFF = "tiers on", "tiers off"
FASTER = 1.5  # on / off, in output tokens per second over all rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Talking:
    """The conversations, and the memory of both servers."""

    model: str = "pair"  # a key of MODELS
    num_clients: int = 140
    num_rounds: int = 12
    request_length: int = 256
    output_length: int = 16
    max_parallel: int = 8
    pool: float = 0.1  # of the device, as a part of the working set
    host_ratio: float = 4.0  # host memory / the device's pool; storage has the rest

    @property
    def longest(self) -> int:
        """Tokens of a conversation when it ends."""
        return self.num_rounds * (self.request_length + self.output_length)

    @property
    def device_tokens(self) -> int:
        """Tokens of the device's pool: at least what requests that run together may need."""
        least = self.max_parallel * (self.longest + 2 * _PAGE)
        return max(int(self.pool * self.num_clients * self.longest), least)


_PAGE = 64

MODELS: dict[str, Callable[[Path], list[str]]] = {
    "pair": lambda scratch: [str(TARGET), *SPECULATIVE],
    "target": lambda scratch: [str(TARGET)],
    "windowed": lambda scratch: [str(save_sibling(scratch / "windowed"))],
}
"""Arguments of a server, by name of the model; a model that is not the demo's is made there."""


def run(talking: Talking, outputs: Outputs) -> bool:
    """Hold the conversations, print a table of the rounds; return whether the claims hold.

    Raises:
        ConfigError: a server did not start, or a file cannot be written.
    """
    outputs.check()
    total = 2 * talking.num_clients * talking.num_rounds
    with (
        tempfile.TemporaryDirectory(prefix="kvkeep-turns-") as scratch,
        servers() as start,
        progress(total) as tell,
    ):
        model = MODELS[talking.model](Path(scratch))
        common = [*model, "--max-total-tokens", str(talking.device_tokens)]
        below = ["--hicache-ratio", str(talking.host_ratio)]
        below += ["--hicache-storage-dir", str(Path(scratch) / "stored")]
        on, off = start([*common, *below], [*common, "--hicache-ratio", "0"])
        turns = asyncio.run(_talk(talking, {ON: on, OFF: off}, tell))
    return _judge(talking, turns, outputs)


class Gate:
    """Lets one side at a time send, for a round; of one event loop.

    Args:
        count: turns of a round.
    """

    def __init__(self, sides: Sequence[str], count: int) -> None:
        self._order, self._count = list(sides), count
        self._open = {side: asyncio.Event() for side in sides}
        self._open[sides[0]].set()
        self._ended = 0  # turns of this round and side

    async def enter(self, side: str) -> None:
        """Wait until it is this side's turn."""
        await self._open[side].wait()

    def leave(self, side: str) -> None:
        """A turn of this side has ended; after the last of a round, the next side may send."""
        self._ended += 1
        if self._ended == self._count:
            self._ended = 0
            self._open[side].clear()
            self._open[self._order[(self._order.index(side) + 1) % len(self._order)]].set()


async def _talk(talking: Talking, sides: dict[str, Server], tell: Tell) -> dict[str, list[Turn]]:
    """All turns of each side."""
    talks = Talks(
        num_clients=talking.num_clients,
        num_rounds=talking.num_rounds,
        request_length=talking.request_length,
        output_length=talking.output_length,
        max_parallel=talking.max_parallel,
        request_rate=float("inf"),
        enable_round_barrier=True,
    )
    turns: dict[str, list[Turn]] = {side: [] for side in sides}
    gate = Gate(list(sides), talking.num_clients)

    def through(side: str, send: Send) -> Send:
        async def sent(call: Call) -> Answer:
            await gate.enter(side)
            return await send(call)

        return sent

    def noted(side: str) -> Callable[[Turn], None]:
        def note(turn: Turn) -> None:
            turns[side].append(turn)
            tell(f"{side}, round {turn.round + 1}", 1)
            gate.leave(side)

        return note

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for side, server in sides.items():
            client = await stack.enter_async_context(connected(target(server)))
            messages, timing = np.random.default_rng(talks.seed).spawn(2)
            source, send = IdSource(messages, VOCABULARY), through(side, client.send)
            group.create_task(Conversations(talks, source, timing, send, noted(side)).run())
    return turns


def _judge(talking: Talking, turns: dict[str, list[Turn]], outputs: Outputs) -> bool:
    rounds = {
        side: [
            round_figures(at + 1, [turn.answer for turn in held if turn.round == at])
            for at in range(talking.num_rounds)
        ]
        for side, held in turns.items()
    }
    heads = ("round", "hit on", "off", "TTFT on", "off (ms)", "tok/s on", "off")
    shown = (("hit_rate", 3), ("mean_ttft_ms", 1), ("output_throughput", 1))
    lines = [
        [str(at + 1), *(number(rounds[side][at][n], d) for n, d in shown for side in (ON, OFF))]
        for at in range(talking.num_rounds)
    ]
    print_rows(console(), f"{talking.device_tokens:,} tokens on the device", heads, lines)
    if outputs.plot is not None:
        draw(multiturn_panels([(side, {"rounds": rounds[side]}) for side in rounds]), outputs.plot)
    setting = asdict(talking) | {"device_tokens": talking.device_tokens}
    figures = {"rounds": rounds, "throughput": {side: _speed(rounds[side]) for side in rounds}}
    return conclude("turns", setting, figures, claims(rounds), outputs)


def claims(rounds: dict[str, list[dict[str, Any]]]) -> list[Claim]:
    """What must hold of the rounds of both sides."""
    failed = sum(one["failed"] for side in rounds.values() for one in side)
    pairs = list(zip(rounds[ON], rounds[OFF], strict=True))[1:]
    first = [(on["mean_ttft_ms"], off["mean_ttft_ms"]) for on, off in pairs]
    lower = sum(on < off for on, off in first if on is not None and off is not None)
    hits = [[one["hit_rate"] or 0.0 for one in rounds[side][1:]] for side in (ON, OFF)]
    ratio = per(_speed(rounds[ON]), _speed(rounds[OFF])) or 0.0
    spans = [f"{min(each):.2f} to {max(each):.2f}" for each in hits]
    return [
        Claim(f"{failed} requests failed", failed == 0),
        Claim(
            f"mean TTFT is lower with the tiers in {lower} of {len(pairs)} rounds after the first "
            f"(hit rate {spans[0]}, without them {spans[1]})",
            lower == len(pairs),
        ),
        Claim(
            f"output tokens per second are {ratio:.2f} >= {FASTER} times those without the tiers",
            ratio >= FASTER,
        ),
    ]


def _speed(rounds: Sequence[dict[str, Any]]) -> float:
    """Output tokens per second, while the side's rounds ran."""
    tokens, seconds = (sum(one[n] for one in rounds) for n in ("output_tokens", "duration"))
    return per(tokens, seconds) or 0.0
