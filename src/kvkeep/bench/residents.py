"""What a full cache costs: time against resident pages, and memory per page."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from .index import Ours
from .load import Load, make_load
from .measure import Note, Row, Samples, Step, Tell, row, uncollected

LENGTH, PAGE = 8192, 64  # tokens
SOURCE = Path(__file__).parent.parent / "core"
EVICT = "evict 64"
VICTIMS = 64  # pages of an eviction; as many come anew, so the cache stays as full
RECENT = 20  # sequences that came last: few enough for the processor's caches
BURST = 250  # matches of a kind, and evictions, in one turn


def measure_times(counts: Sequence[int], repeats: int, tell: Tell) -> list[Row]:
    """Match, commit a page and evict, on caches of so many resident pages, taking turns.

    Matching is compared with the first cache, which should be the smallest.
    """
    more = repeats * -(-(BURST + 1) * VICTIMS * PAGE // LENGTH)  # sequences that come
    most = max(counts) * PAGE // LENGTH + more
    everything = make_load(most, LENGTH, PAGE, groups=most).tokens
    samples, caches = Samples(), dict[str, _Full]()
    for count in counts:
        tell(f"filling a cache with {count:,} pages")
        held = count * PAGE // LENGTH
        caches[f"{count:,} resident"] = _Full(Load(everything[: held + more], PAGE), held)
    for turn in range(repeats):
        for name, cache in caches.items():
            tell(f"{name}: turn {turn + 1} of {repeats}")
            with uncollected():
                cache.live(partial(samples.time, name))
    rows, first = list[Row](), next(iter(caches))
    for name in caches:
        rows += samples.rows(f"{name}:", name, [])
        if name != first:
            rows += [r for r in samples.rows(f"{name}:", name, [first]) if "match" in r["name"]]
        mean = float(np.mean(samples.taken(name, EVICT))) * 1e6
        rows.append(row(f"{name}: {EVICT}, amortised", mean, "us"))
    return rows


class _Full:
    """A cache that holds the first ``held`` sequences of its load, which have nothing in common.
    The others come one after another, and the oldest go."""

    def __init__(self, load: Load, held: int) -> None:
        self._held, self._length = held, load.length
        self._index = Ours(load, slots=held * load.length // load.page_tokens)
        self._random = np.random.default_rng(held)
        self._newest, self._end = -1, load.length  # the sequence that is coming, and how much has
        for _ in range(held):
            self._come(load.length)()

    def live(self, note: Note) -> None:
        """One turn."""
        for i in self._random.integers(self._newest - self._held + 1, self._newest, BURST).tolist():
            note("match, any", self._index.match(i))
        late = self._newest - np.arange(1, 1 + min(RECENT, self._newest))
        for i in late.tolist():
            self._index.match(i)()  # so that each cache begins with them in the processor's
        for i in self._random.choice(late, BURST).tolist():
            note("match, recent", self._index.match(i))
        for _ in range(BURST):
            note(EVICT, self._index.evict(VICTIMS))
            self._come(VICTIMS * PAGE)()
        self._index.evict(VICTIMS)()
        for _ in range(VICTIMS):
            note("commit a page", self._come(PAGE))

    def _come(self, tokens: int) -> Step:
        """So many more of the sequence that is coming, or of the next."""
        if self._end == self._length:
            self._newest, self._end = self._newest + 1, 0
        self._end += tokens
        return self._index.extend(self._newest, self._end)


def measure_memory(pages: int, tell: Tell) -> list[Row]:
    """Bytes per page of table, tree and tier, by what tracemalloc says each file allocated."""
    load = make_load(pages * PAGE // LENGTH, LENGTH, PAGE, groups=pages)
    rows = []
    for groups in (1, 4):
        tell(f"memory of {pages:,} pages in {groups} groups")
        tracemalloc.start(8)
        index = Ours(load, groups)
        for i in range(load.sequences):
            for stop in range(512, LENGTH + 1, 512):
                index.extend(i, stop)()
        taken = tracemalloc.take_snapshot()
        tracemalloc.stop()
        for name, file in (("table", "pages.py"), ("tree", "tree.py"), ("tier", "tier.py")):
            here = tracemalloc.Filter(True, str(SOURCE / file), all_frames=True)
            size = sum(trace.size for trace in taken.filter_traces([here]).traces)
            rows.append(
                row(
                    f"{name}, {groups} group{'s' * (groups > 1)}",
                    size / index.resident(),
                    "bytes/page",
                )
            )
    return rows
