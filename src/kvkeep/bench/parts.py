"""What can be measured, by name. A part's module is imported when it is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .measure import Row, Tell


@dataclass(frozen=True, slots=True)
class Setting:
    """What somebody asked for."""

    repeats: int = 5  # turns of each side
    quick: bool = False  # sizes that show that it runs, and nothing else
    sglang: Path | None = None  # a directory to import SGLang from
    vllm: bool = False  # compare with the vLLM that is installed
    directory: Path | None = None  # for files; None: the temporary one
    kvkeep: Path | None = None  # a checkout of another commit, the only peer then


def _tree(length: int, sequences: int, setting: Setting, tell: Tell) -> list[Row]:
    from . import tree
    from .load import make_load
    from .peers import indexes

    if setting.quick:
        length, sequences = 2048, 24
    peers = indexes(setting.sglang, setting.vllm)
    loads = [make_load(sequences, length, 64), make_load(max(24, sequences // 4), length, 16)]
    return [row for load in loads for row in tree.measure(load, peers, setting.repeats, tell)]


def _calls(setting: Setting, tell: Tell) -> list[Row]:
    from . import calls
    from .load import make_load
    from .peers import caches

    load = make_load(24, 2048, 64) if setting.quick else make_load(250, 8192, 64)
    return calls.measure(load, caches(setting.sglang), setting.repeats, tell)


def _residents(setting: Setting, tell: Tell) -> list[Row]:
    from .residents import measure_times

    counts = (1280, 2560) if setting.quick else (10_000, 100_000, 1_000_000, 2_000_000)
    return measure_times(counts, setting.repeats, tell)


def _memory(setting: Setting, tell: Tell) -> list[Row]:
    from .residents import measure_memory

    return measure_memory(1280 if setting.quick else 100_000, tell)


def _copies(setting: Setting, tell: Tell) -> list[Row]:
    from .copies import measure

    return measure(1 if setting.quick else 256, setting.repeats, tell)


def _files(setting: Setting, tell: Tell) -> list[Row]:
    from . import files
    from .peers import stores

    makes = stores(setting.sglang)
    sizes = (8 << 10,) if setting.quick else (1 << 20, 64 << 10)
    total = files.BATCH * sizes[0] if setting.quick else files.TOTAL
    measure = partial(files.measure, where=setting.directory)
    return [row for n in sizes for row in measure(n, total, makes, setting.repeats, tell)]


def _decode(setting: Setting, tell: Tell) -> list[Row]:
    from .decode import measure

    steps = 1 if setting.quick else 8 * setting.repeats  # a turn is of one step
    return measure(steps, lambda: tell("decoding"))


def _engine(setting: Setting, tell: Tell) -> list[Row]:
    from . import engine

    lengths = (320,) if setting.quick else engine.LENGTHS
    return engine.measure(setting.repeats, tell, lengths)


PARTS: dict[str, Callable[[Setting, Tell], list[Row]]] = {
    "tree8k": partial(_tree, 8192, 1000),
    "tree32k": partial(_tree, 32_768, 100),
    "tree131k": partial(_tree, 131_072, 25),
    "calls": _calls,
    "residents": _residents,
    "memory": _memory,
    "copies": _copies,
    "files": _files,
    "decode": _decode,
    "engine": _engine,
}
"""By name: ``measure(setting, tell) -> rows``."""


def core(quick: bool) -> tuple[str, ...]:
    """Those that measure the cache, and neither models nor servers. Tiny trees are all the same."""
    trees = ("tree8k",) if quick else ("tree8k", "tree32k", "tree131k")
    return (*trees, "calls", "residents", "memory", "copies", "files")
