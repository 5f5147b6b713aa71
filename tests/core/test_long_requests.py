"""A long request holds only its window's tail and the pages that it may write next."""

import random

import numpy as np
import pytest
from schemas import group

from kvkeep.core.cache import Cache
from kvkeep.schema import Identity, Schema
from kvkeep.testing.fakes import AtOnce, NoBytes

pytestmark = pytest.mark.untraced

TOKENS, PROMPT, CHUNK, WINDOW, AHEAD = 32_768, 24_576, 512, 1024, 8


@pytest.mark.parametrize("page", [16, 64])
def test_decoding_holds_no_more_than_the_window(page: int) -> None:
    """At any length and accept length. A pool with room for the window and one chunk is
    enough."""
    tail = -(-(WINDOW - 1) // page)
    schema = Schema(Identity("m"), page, (group("full"), group("window", tail)))
    room = [TOKENS // page + 2, tail + 1 + CHUNK // page]
    cache = Cache(schema, room, [0, 0], media=NoBytes(), lane=AtOnce)
    rng = random.Random(page)
    tokens = np.arange(TOKENS + AHEAD, dtype=np.int32)
    most = tail + 1 + -(-(AHEAD + 1) // page)
    lease = cache.admit(tokens[:PROMPT], chunk=CHUNK)
    assert lease is not None
    for final in range(CHUNK, PROMPT + 1, CHUNK):
        assert cache.grow(lease, final)
        cache.commit(lease, tokens[:final])
    while final < TOKENS:
        assert cache.grow(lease, final + AHEAD + 1)
        assert np.count_nonzero(lease.slots("window") >= 0) <= most
        final += 1 + rng.randrange(AHEAD + 1)
        cache.commit(lease, tokens[:final])
        assert np.count_nonzero(lease.slots("window") >= 0) <= most
        assert (lease.slots("window")[final // page - tail : final // page] >= 0).all()
    cache.check()
    cache.release(lease)
    cache.check()
