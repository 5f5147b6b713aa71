"""Processes that share a store's directory with a test. Run as a script, it prints JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import NoReturn

from kvkeep.schema import Key
from kvkeep.stores.file import FileStore

GROUP = b"shared by many16"
SIZE = 1 << 15
SLOT = 4096 + SIZE
KEYS = 1600


def key(number: int) -> Key:
    return Key(GROUP, hashlib.sha256(b"%d" % number).digest())


def body(number: int) -> memoryview:
    return memoryview(hashlib.sha256(b"body %d" % number).digest() * (SIZE // 32))


def read(store: FileStore, numbers: list[int]) -> tuple[list[int], list[int]]:
    """The numbers that were hits, and those of them whose bytes were wrong."""
    out = [memoryview(bytearray(SIZE)) for _ in numbers]
    answers = zip(numbers, store.read([key(n) for n in numbers], out), out, strict=True)
    hits = [(n, buffer) for n, hit, buffer in answers if hit]
    return [n for n, _ in hits], [n for n, buffer in hits if buffer != body(n)]


def write(store: FileStore, numbers: list[int]) -> list[bool]:
    return store.write([key(n) for n in numbers], [body(n) for n in numbers])


def hammer(directory: Path, seed: int, slots: int, rounds: int) -> dict[str, object]:
    """Say so and wait for a line; then read what is there and write what is not, at random, of
    more keys than there is room for."""
    store = FileStore(directory, {GROUP: SIZE}, slots * SLOT)
    pick = random.Random(seed)
    seen: Counter[str] = Counter()
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(rounds):
        numbers = pick.sample(range(slots * 3 // 2), pick.randint(1, 4))
        hits, wrong = read(store, numbers)
        answers = write(store, [n for n in numbers if n not in hits])
        seen.update(hits=len(hits), wrong=len(wrong), written=len(answers))
    store.close()
    return {**seen, "faults": store.faults}


def hold(directory: Path, slots: int) -> NoReturn:
    """Claim all slots, say so, and hang."""
    store = FileStore(directory, {GROUP: SIZE}, slots * SLOT)
    grant = store._allocate([key(n) for n in range(slots)])
    print(len(grant.claims), flush=True)
    signal.pause()
    raise AssertionError("somebody woke us")


def kill(directory: Path, seed: int, slots: int, times: int) -> dict[str, object]:
    """Fork a writer and kill it at a random moment, so many times."""
    pick = random.Random(seed)
    told, tell = os.pipe()
    os.set_blocking(told, False)
    stored: set[int] = set()  # what writers were told is stored
    crashed = 0  # writers that ended by themselves
    for turn in range(times):
        writer = os.fork()
        if not writer:
            _write_for_ever(directory, random.Random(f"{seed} {turn}"), slots, tell)
        if turn % 4 == 0:  # however slow the machine is, some write
            select.select([told], [], [], 60.0)
        time.sleep(pick.uniform(0.0, 0.04))
        os.kill(writer, signal.SIGKILL)
        _, status = os.waitpid(writer, 0)
        crashed += not os.WIFSIGNALED(status)
        with contextlib.suppress(BlockingIOError):  # killed before it could store anything
            stored.update(n for (n,) in struct.iter_unpack("<I", os.read(told, 1 << 16)))
    return {"stored": sorted(stored), "crashed": crashed}


def _write_for_ever(directory: Path, pick: random.Random, slots: int, tell: int) -> NoReturn:
    try:
        store = FileStore(directory, {GROUP: SIZE}, slots * SLOT)
        while True:
            numbers = pick.sample(range(KEYS), 4)
            answers = write(store, numbers)
            stored = [n for n, answer in zip(numbers, answers, strict=True) if answer]
            os.write(tell, struct.pack(f"<{len(stored)}I", *stored))
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    run = {"hammer": hammer, "hold": hold, "kill": kill}[sys.argv[1]]
    print(json.dumps(run(Path(sys.argv[2]), *map(int, sys.argv[3:]))))
