"""Tree and table beside peers': insert, commit, match, evict, on trees that have lived."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from .index import Index, Ours
from .load import Load
from .measure import Note, Row, Samples, Tell, uncollected

ONE, FOUR = "one group", "four groups"  # our sides

CHUNK = 512  # tokens of a prefill chunk
RUNNING = 16  # requests that are computed together: their pages come in turns
GENERATED = 8  # pages that come one by one, behind a prompt that came by chunks
VICTIMS = 64  # pages of an eviction, as one admission needs them

BUILT = ("whole", "grown")

Make = Callable[[Load], Index]


def measure(load: Load, peers: dict[str, Make], repeats: int, tell: Tell) -> list[Row]:
    """One row per operation, way of building and peer. Sides take turns, ``repeats`` times."""
    samples = Samples()
    sides: list[tuple[str, Make]] = [(ONE, Ours), (FOUR, partial(Ours, groups=4)), *peers.items()]
    label = f"{load.length // 1024}k/{load.page_tokens}"
    for turn in range(repeats):
        sides = sides[1:] + sides[:1]
        for built in BUILT:
            for name, make in sides:
                tell(f"{label}, {built}, turn {turn + 1} of {repeats}: {name}")
                with uncollected():
                    live(make(load), load, built, partial(samples.time, name))
    return samples.rows(label, ONE, list(peers)) + samples.rows(f"{label} 4 groups:", FOUR, [ONE])


def live(side: Index, load: Load, built: str, note: Note) -> None:
    """A cache's life: filled, half evicted, and filled again, so that page ids and slots lie
    about as they do after hours of service; then matched, evicted by half, and by bits.

    Args:
        built: "whole": each sequence is inserted once; "grown": as its request is computed.
    """
    random = np.random.default_rng(0)
    for final in (False, True):
        for first in range(0, load.sequences, RUNNING):
            _serve(side, load, range(first, min(first + RUNNING, load.sequences)), built, note)
        if not final:
            side.evict(side.resident() // 2)()
    matches = {"match": side.match, "match to slots": side.slots, "match a list": side.match_list}
    for operation, prepare in matches.items():
        for i in random.permutation(load.sequences).tolist():
            note(f"{operation} ({built})", prepare(i))
    full = side.resident()
    note(f"evict half ({built})", side.evict(full // 2))
    for _ in range(32):
        if side.resident() > full // 4:  # some evict more than they are asked to
            note(f"evict {VICTIMS} ({built})", side.evict(VICTIMS))


def _serve(side: Index, load: Load, batch: range, built: str, note: Note) -> None:
    """Requests that run together: each step is one turn of every request that has more to come."""
    page, length = load.page_tokens, load.length
    phases = [("insert", length, length)]
    if built == "grown":
        prompt = length - GENERATED * page
        phases = [("commit a chunk", CHUNK, prompt), ("commit a page", page, length)]
    done = {i: side.begin(i) for i in batch}
    for operation, step, end in phases:
        while late := [i for i in batch if done[i] < end]:
            for i in late:
                done[i] = min(done[i] + step, end)
                note(operation, side.extend(i, done[i]))
