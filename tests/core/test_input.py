"""Arguments of callers: tokens, namespaces, component names."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from schemas import TWO, P
from test_cache import A, lease_of, serve, world

from kvkeep.core.pages import Retention
from kvkeep.schema import Component, ConfigError, Group, RequestError

BELOW, ABOVE = -(1 << 31) - 1, 1 << 31
WRONG = {
    "above int32": np.array([1, ABOVE], np.int64),
    "below int32": np.array([BELOW, 1], np.int64),
    "above int32, unsigned": np.array([1, ABOVE], np.uint64),
    "Python integers": [1, ABOVE, 3],
    "floats": np.array([1.0, 2.0, 3.0], np.float32),
    "whole floats": [1.0, 2.0, 3.0],
    "booleans": np.array([True, False, True]),
    "two dimensions": np.ones((2, 3), np.int32),
    "no dimension": np.array(7, np.int32),
    "text": np.array(["a", "b"]),
}


@pytest.mark.parametrize("tokens", list(WRONG.values()), ids=list(WRONG))
@pytest.mark.parametrize("call", ["prefetch", "admit", "commit"])
def test_tokens_that_are_no_row_of_int32_are_refused(call: str, tokens: object) -> None:
    """And no slots are taken. If they were cast, they would hit other tokens' pages."""
    w = world()
    request = lease_of(w, A)
    before, lease = w.cache.figures(), (request.lease,) if call == "commit" else ()
    with pytest.raises(RequestError, match="tokens must"):
        getattr(w.cache, call)(*lease, tokens)
    assert w.cache.figures() == before
    assert request.lease.pages == 0
    w.check()
    w.finish()


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.uint8, ">i4", ">i8"])
def test_integers_of_any_width_are_the_same_tokens(dtype: str) -> None:
    w = world()
    serve(w, A)
    lease = w.cache.admit(np.array(A, dtype), chunk=P)
    assert lease.pages == 3
    w.cache.release(lease)
    assert w.cache.admit(A).pages == 3, "a list"


def test_the_ends_of_int32_are_tokens() -> None:
    w = world()
    ends = [BELOW + 1, ABOVE - 1] * 3
    serve(w, ends)
    assert w.cache.admit(np.array(ends, np.int64)).pages == 2
    wrapped = np.array([ABOVE - 1, BELOW + 1] * 3, np.int64)
    assert w.cache.admit(wrapped).pages == 0


def test_tokens_that_are_no_run_of_memory() -> None:
    """Arrays that are not contiguous: every second token, and reversed."""
    w = world()
    serve(w, A)
    apart = np.zeros(2 * len(A), np.int32)
    apart[::2] = A
    assert w.cache.admit(apart[::2]).pages == 3
    assert w.cache.admit(np.array(A[::-1], np.int32)[::-1]).pages == 3


@pytest.mark.parametrize("committed", [3, 2 * P + 1, 7])
def test_what_has_no_slots_is_not_committed(committed: int) -> None:
    """The last page with slots may be committed, the next one may not."""
    w = world()
    request = lease_of(w, A)
    lease, tokens = request.lease, np.array(A, np.int32)
    assert lease.capacity == 1
    with pytest.raises(RequestError, match="slots"):
        w.cache.commit(lease, tokens[:committed])
    w.cache.check()
    assert lease.pages == 0
    assert w.tree() == {}
    w.run(request, P)
    assert lease.pages == 1
    w.finish()


# --- namespaces


def test_a_namespace_is_kept_as_a_digest() -> None:
    """No lease, prefetch or tree keeps a 10 MB salt."""
    w = world(device=400, host=400)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = []
        for n in range(60):
            namespace = f"{n}" + "x" * 10_000_000
            kept.append(w.cache.prefetch(np.array(A, np.int32), namespace))
            lease = w.cache.admit(np.array(A, np.int32), namespace, chunk=7)
            w.cache.commit(lease, np.array(A, np.int32))
            kept.append(lease)
            del namespace
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held < 10_000_000, "a salt is kept"
    assert {len(one.root) for one in kept} == {32}
    assert len({one.root for one in kept}) == 60
    assert w.cache.figures()["pages"] == 60 * 3


# --- names


def test_components_have_names_of_their_own() -> None:
    one = Component("k", (0,), (1,), "F32")
    with pytest.raises(ConfigError, match=r"'kv'.*component names must differ"):
        Group("kv", (one, replace(one, dtype="U8")))
    with pytest.raises(ConfigError, match="group names must differ"):
        replace(TWO, groups=(TWO.groups[0], TWO.groups[0]))
    assert len(Group("kv", (one, replace(one, name="v"))).components) == 2


def test_a_request_may_hit_nothing_and_share_all() -> None:
    """As one that needs the logits of its whole prompt."""
    w = world()
    serve(w, A)
    known = w.cache.admit(A)
    lease = w.cache.admit(A, chunk=len(A), reuse=False)
    assert (known.pages, lease.pages) == (3, 0)
    w.cache.commit(lease, np.array(A))
    assert lease.path[:3].tolist() == known.path.tolist()
    for one in (known, lease):
        w.cache.release(one)
    w.cache.check()


def test_a_request_may_leave_nothing() -> None:
    """It may hit what others left."""
    w = world()
    serve(w, A[:5])
    pages = w.cache.figures()["pages"]
    lease = w.cache.admit(A, chunk=len(A), retention=Retention(keep=False))
    assert lease.pages == 2
    w.cache.commit(lease, np.array(A))
    w.cache.release(lease)
    assert w.cache.figures()["pages"] == pages
    assert w.cache.admit(A).pages == 2
    w.cache.check()
