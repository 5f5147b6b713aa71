"""Random walks through small worlds: like the state machine, but faster and without shrinking.

``python walks.py FIRST LAST`` walks from all seeds of a range; a failure names its seed.
"""

from __future__ import annotations

import logging
import random
import sys
from collections import Counter

from request import Path
from schemas import FIVE, FOUR, TWO, P, group
from world import World

from kvkeep.schema import Identity, Schema

LANES = ("save", "load", "write", "read")


def any_world(rng: random.Random) -> World:
    """A world of random groups in random order, with tiny pools."""
    groups = [group("full")] if rng.random() < 0.9 else []
    working = rng.choice([0, 1, 1, 2])
    for name, tail, work in (
        ("window", rng.randrange(1, 4), 0),
        ("state", 1, working),
        ("draft", None, 0),
        ("near draft", rng.randrange(1, 3), 0),
    ):
        if rng.random() < 0.6 or (not groups and name == "near draft"):
            groups.append(group(name, tail, not groups or rng.random() < 0.6, work))
    rng.shuffle(groups)
    device = [rng.randrange(3, 12) for _ in groups]
    host = [rng.choice([0, 1, 2, 4, 6, 10, 14]) for _ in groups]
    schema = Schema(Identity("m"), P, tuple(groups))
    missing, select = rng.choice(["strict", "lenient"]), rng.choice([0.02, 0.3, 0.6, 1.0])
    return World(schema, device, host, missing, select, rng.choice([None, None, 1, 2]))


WINDOWS = Schema(Identity("m"), P, (group("window", 2), group("state", 1, working=1)))
KINDS = {
    "two": lambda _: World(TWO, [7, 6], [8, 9]),
    "four": lambda _: World(FOUR, [8, 7, 6, 8], [9, 8, 7, 9]),
    "wide": lambda _: World(FOUR, [16, 14, 12, 16], [17, 15, 13, 17]),
    "lenient": lambda _: World(FOUR, [8, 7, 6, 7], [9, 8, 7, 8], missing="lenient"),
    "five": lambda _: World(FIVE, [9, 7, 4, 9, 7], [9, 8, 5, 9, 8], every=3),
    "no vital": lambda _: World(WINDOWS, [6, 5], [7, 6]),
    "any": any_world,
}
STEPS = {
    "arrive": 4, "admit": 6, "run": 7, "abort": 1.5, "preempt": 0.5, "step": 7, "tick": 7,
    "settle": 1, "evict": 2.5, "empty": 1, "lose": 0.4, "outage": 0.3, "restart": 0.6,
}  # fmt: skip


def walk(kind: str, seed: int, steps: int = 150) -> Counter[str]:
    """One walk, watched after every step; returns what happened."""
    rng = random.Random(seed)
    world = KINDS[kind](rng)
    world.reads = (None, 0, 600)[seed % 3]  # reads: any size, one page, or a few pages
    world.restart()
    for n, step in enumerate(rng.choices(list(STEPS), list(STEPS.values()), k=steps)):
        one(world, step, rng)
        watch(world, n)
    world.finish()
    return world.happened


def watch(world: World, step: int) -> None:
    """Compare the state after every step, and audit it after every third: the audit takes twice as
    long as all else, and bookkeeping that is wrong stays wrong."""
    if step % 3:
        world.compare()
    else:
        world.check()


def one(world: World, step: str, rng: random.Random) -> None:
    """Take a step of this kind if one is possible."""
    waiting = [r for r in world.requests if not r.lease]
    running = [r for r in world.requests if r.lease]
    if step == "arrive" and len(world.requests) < 5:
        namespace, tokens = _known(world, rng) or ("", ())
        tokens += tuple(int(rng.random() < 0.1) for _ in range(rng.randrange(1, 14)))
        namespace = "b" if rng.random() < 0.1 else namespace
        world.arrive(tokens[:13], namespace, ask=rng.random() < 0.7)
    elif step == "admit" and waiting:
        for request in rng.sample(waiting, len(waiting)):
            if world.admit(request, rng.randrange(5)):
                break
    elif step == "run" and running:
        commit, stop = rng.random() < 0.8, rng.random() < 0.9
        world.run(rng.choice(running), rng.randrange(6), rng.randrange(5), commit, stop)
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
    elif step == "settle":
        world.settle()
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


def _known(world: World, rng: random.Random) -> Path | None:
    """Half of the time, a page that an earlier prompt had."""
    known = sorted(world.names.values())
    return rng.choice(known) if known and rng.random() < 0.5 else None


def main(first: int, last: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, last):
        for kind in KINDS:
            try:
                happened += walk(kind, seed)
            except BaseException:
                print(f"walk({kind!r}, {seed})", file=sys.stderr)
                raise
    print(dict(happened))


if __name__ == "__main__":
    logging.disable()
    main(*map(int, sys.argv[1:]))
