"""Random walks through worlds: what the state machine does, without shrinking but much faster.

``python walks.py [seconds] [first seed]`` walks on and on; a failure names its seed.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections import Counter

from worlds import FOUR, TWO, World

LANES = ("save", "load", "write", "read")
KINDS = {
    "two": lambda: World(TWO, [7, 6], [8, 9]),
    "four": lambda: World(FOUR, [8, 7, 6, 8], [9, 8, 7, 9]),
    "wide": lambda: World(FOUR, [16, 14, 12, 16], [17, 15, 13, 17]),
    "lenient": lambda: World(FOUR, [8, 7, 6, 7], [9, 8, 7, 8], missing="lenient"),
}
STEPS = {
    "arrive": 4, "admit": 5, "run": 7, "abort": 2, "preempt": 0.5, "step": 8, "tick": 6,
    "evict": 2.5, "empty": 0.6, "lose": 0.4, "outage": 0.3, "restart": 0.3,
}  # fmt: skip


def walk(kind: str, seed: int, steps: int = 150) -> Counter[str]:
    """One walk, checked after every step; what happened on it."""
    rng = random.Random(seed)
    world = KINDS[kind]()
    for step in rng.choices(list(STEPS), list(STEPS.values()), k=steps):
        one(world, step, rng)
        world.check()
    world.finish()
    return world.happened


def one(world: World, step: str, rng: random.Random) -> None:
    """Take a step of this kind, if one can be taken."""
    waiting = [r for r in world.requests if not r.lease]
    running = [r for r in world.requests if r.lease]
    if step == "arrive" and len(world.requests) < 5:
        tokens = [int(rng.random() < 0.2) for _ in range(rng.randrange(1, 14))]
        world.arrive(tokens, rng.choice(["", "", "b"]), ask=rng.random() < 0.7)
    elif step == "admit" and waiting:
        for request in rng.sample(waiting, len(waiting)):
            if world.admit(request, rng.randrange(5)):
                break
    elif step == "run" and running:
        world.run(rng.choice(running), rng.randrange(6), rng.randrange(5), rng.random() < 0.8)
    elif step == "abort" and world.requests:
        world.release(rng.choice(world.requests))
    elif step == "preempt" and running:
        world.release(rng.choice(running), again=True)
    elif step == "step":
        lanes = [name for name in LANES if world.lanes[name].queue]
        if lanes:
            fault = rng.choice([""] * 10 + ["partial", "raise"])
            world.step(rng.choice(lanes), rng.randrange(9), rng.randrange(1, 6), fault)
    elif step == "tick":
        world.tick()
    elif step == "evict":
        world.evict(rng.randrange(2), rng.choice(world.groups), rng.randrange(1, 4))
    elif step == "empty":
        world.empty(rng.choice([0, 0, 0, 1]))
    elif step == "lose":
        world.lose(rng.randrange(99))
    elif step == "outage":
        world.outage(rng.random() < 0.3)
    elif step == "restart":
        world.restart()


def main(seconds: float, seed: int) -> None:
    happened: Counter[str] = Counter()
    end, first = time.monotonic() + seconds, seed
    while time.monotonic() < end:
        for kind in KINDS:
            try:
                happened += walk(kind, seed)
            except BaseException:
                print(f"walk({kind!r}, {seed})", file=sys.stderr)
                raise
        seed += 1
    print(f"{seed - first} seeds", dict(happened))


if __name__ == "__main__":
    logging.disable()
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60, int((sys.argv[2:] or [0])[0]))
