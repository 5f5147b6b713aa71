"""Measures where a decoding step spends its time; prints a Markdown table.

Runs the demo's target in float32 on one thread with 1,024 tokens of context; no pages are shared.
The table has median CPU times, each part without the parts it calls. docs/step-profile.md has the
results of one run.

    python -m scripts.profile_step --steps 60
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from statistics import median
from typing import Any

import torch

from kvkeep.bench import decode
from kvkeep.bench.measure import one_thread
from kvkeep.engine import runner
from kvkeep.engine.core import Engine
from kvkeep.models.attention.cascade import CascadePlan


class Clock:
    """Accumulates CPU seconds by part."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._inside = 0.0  # seconds that the current call has spent in nested timed calls

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Replace ``owner.name`` with a wrapper that adds its time to ``part``."""
        call = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            outside, self._inside = self._inside, 0.0
            start = time.thread_time()
            found = call(*args, **options)
            taken = time.thread_time() - start
            self._spent[part] += taken - self._inside
            self._inside = outside + taken
            return found

        setattr(owner, name, timed)

    def lap(self) -> dict[str, float]:
        """Return the seconds by part since the last call, and start over."""
        spent, self._spent = dict(self._spent), defaultdict(float)
        return spent


def profile(batch: int, steps: int) -> dict[str, float]:
    """Median milliseconds of ``steps`` decoding steps by part, the largest first."""
    prompts = decode._prompts(batch, decode.EQUAL)
    with decode._decoding(prompts, steps) as engine:
        clock = watched(engine)
        laps = []
        for _ in range(decode.WARM_UP + steps):
            engine.turn()
            laps.append(clock.lap())
    parts = {part: 1e3 * median(lap[part] for lap in laps[decode.WARM_UP :]) for part in laps[-1]}
    return dict(sorted(parts.items(), key=lambda one: -one[1]))


def watched(engine: Engine) -> Clock:
    """Wrap the parts of the engine's turn; return the clock that times them."""
    clock = Clock()
    clock.watch(engine, "turn", "engine: messages, text, commits")
    clock.watch(engine.cache, "tick", "cache: completed transfers")
    clock.watch(engine.scheduler, "schedule", "scheduler: admission, slots")
    clock.watch(engine._runner, "step", "runner: packing, accepting")
    clock.watch(runner, "sample", "sampling")
    clock.watch(engine._target, "forward", "model without attention")
    clock.watch(engine._target.attention, "plan", "attention: the step's plan")
    clock.watch(CascadePlan, "write", "attention: keys and values into pages")
    clock.watch(CascadePlan, "attend", "attention: the kernel")
    return clock


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    with one_thread(), torch.inference_mode():
        found = [profile(batch, steps) for batch in decode.BATCHES]
    print("| part |", " | ".join(f"batch {batch}, ms" for batch in decode.BATCHES), "|")
    print("|---" + "|--:" * len(found) + "|")
    for part in found[-1]:
        print(f"| {part} |", " | ".join(f"{parts[part]:.2f}" for parts in found), "|")
    print("| **all** |", " | ".join(f"**{sum(parts.values()):.2f}**" for parts in found), "|")


if __name__ == "__main__":
    main()
