"""Many conversations in a small window pool: it keeps the pages that next turns need."""

import random

import numpy as np
import pytest
from schemas import group

from kvkeep.core.cache import Cache
from kvkeep.schema import Identity, Schema
from kvkeep.testing.fakes import AtOnce, NoBytes

pytestmark = pytest.mark.untraced

P = 4
SESSIONS, TURNS = 60, 1500
TURN, CHUNK, LONGEST = 16, 8, 200  # pages


def cached_pages(window_slots: int, turns: int = TURNS) -> tuple[int, int]:
    """Pages that hits found, and pages that they could have found, over all turns."""
    schema = Schema(Identity("m"), P, (group("full"), group("window", 2)))
    cache = Cache(schema, [20_000, window_slots], [0, 0], media=NoBytes(), lane=AtOnce)
    rng, found, known = random.Random(1), 0, 0
    said = {session: (0, session) for session in range(SESSIONS)}  # pages, seed of its tokens
    for _ in range(turns):
        session = rng.randrange(SESSIONS)
        pages, seed = said[session]
        if pages > LONGEST:
            pages, seed = 0, rng.randrange(1 << 30)
        all_tokens = np.random.default_rng(seed).integers(0, 1 << 20, (LONGEST + 2 * TURN) * P)
        tokens = all_tokens[: (pages + TURN) * P + 1].astype(np.int32)
        lease = cache.admit(tokens, chunk=CHUNK * P)
        assert lease is not None
        found, known = found + lease.pages, known + pages
        for end in range((lease.pages + CHUNK) * P, len(tokens) + CHUNK * P, CHUNK * P):
            end = min(end, len(tokens))
            assert cache.grow(lease, end)
            cache.commit(lease, tokens[:end])
        cache.release(lease)
        cache.tick()
        said[session] = pages + TURN, seed
    cache.check()
    return found, known


def test_idle_conversations_keep_their_windows() -> None:
    """240 window slots: two pages for each of 60 conversations, the rest for running requests."""
    found, known = cached_pages(240)
    assert found >= 0.95 * known


def test_nothing_is_lost_where_nothing_must_go() -> None:
    """``known`` is what a window pool without limits gives."""
    found, known = cached_pages(100_000, turns=300)
    assert found == known
