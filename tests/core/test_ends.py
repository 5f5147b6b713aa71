"""How a cache ends: closed, left as a context, garbage collected, or at process exit."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from schemas import TWO

from kvkeep.core.cache import Cache
from kvkeep.core.policy import Policy
from kvkeep.schema import Closed
from kvkeep.testing.fakes import DictStore, TruthMedia

TOKENS = np.array([1, 1, 2, 2, 3, 3, 4], np.int32)


class Closing(DictStore):
    closed = 0

    def close(self) -> None:
        self.closed += 1


def make(store: DictStore | None = None) -> Cache:
    return Cache(TWO, [16] * 2, [16] * 2, store, Policy(), TruthMedia([16] * 2, [16] * 2))


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvkeep-")}


def compute(cache: Cache) -> None:
    lease = cache.admit(TOKENS, chunk=7)
    assert lease is not None
    cache.commit(lease, TOKENS)
    cache.release(lease)


def test_a_cache_closes_itself_as_a_context() -> None:
    store, before = Closing(), lanes()
    with make(store) as cache:
        compute(cache)
        mine = lanes() - before
        assert len(mine) == 5
    assert store.closed == 1
    assert len(store.records) == 6, "what was committed is written first"
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(Closed):
        cache.admit(TOKENS)
    cache.close()
    assert store.closed == 1


def test_a_context_closes_whatever_happened_in_it() -> None:
    store = Closing()
    with pytest.raises(ZeroDivisionError), make(store) as cache:
        raise ZeroDivisionError
    assert store.closed == 1
    with pytest.raises(Closed):
        cache.prefetch(TOKENS)


@pytest.mark.parametrize("used", [False, True])
def test_a_cache_that_is_dropped_ends_its_lanes(used: bool) -> None:
    before = lanes()
    cache = make(DictStore())
    if used:
        compute(cache)
        assert cache.drain()
    mine, gone = lanes() - before, weakref.ref(cache)
    assert len(mine) == 5
    del cache
    gc.collect()
    assert gone() is None, "something keeps a cache alive"
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()


def test_an_owner_that_listens_and_is_dropped_ends_its_lanes() -> None:
    """A listener leads back to the cache, as an engine's does: a lane must not keep it alive."""

    class Owner:
        def __init__(self) -> None:
            self.cache = make(DictStore())
            self.cache.listen(lambda: self.wake())

        def wake(self) -> None: ...

    before = lanes()
    owner = Owner()
    mine, gone = lanes() - before, weakref.ref(owner)
    assert len(mine) == 5
    del owner
    gc.collect()
    assert gone() is None
    for thread in mine:
        thread.join(30)
        assert not thread.is_alive()


# --- with the process

START = """
    import atexit
    from pathlib import Path
    import numpy as np
    from kvkeep.core.cache import Cache
    from kvkeep.core.policy import Policy
    from kvkeep.media.memory import Memory
    from kvkeep.schema import Component, Group, Identity, Schema
    from kvkeep.stores.file import FileStore

    layers = tuple(range(LAYERS))
    kv = tuple(Component(name, layers, (16, 8, 128), "F32") for name in "kv")
    schema = Schema(Identity("m"), 16, (Group("full", kv),))
    sizes = {schema.fingerprint(group): group.record_bytes for group in schema.groups}
    tokens = np.arange(16 * PAGES + 1, dtype=np.int32)
"""


def whole(script: str, **constants: object) -> str:
    """The script's code, after the constants and the start."""
    head = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    return head + textwrap.dedent(START) + textwrap.dedent(script)


def process(script: str, **constants: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", whole(script, **constants)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_process_exits_without_close() -> None:
    """While its lanes copy layer by layer: they end before the interpreter unloads torch.

    Four times, each in a fork of what has been imported."""
    script = """
        import os, sys
        for _ in range(4):
            child = os.fork()
            if not child:
                break
            if status := os.waitpid(child, 0)[1]:
                sys.exit(f"a child ended with {status}")
        else:
            sys.exit()
        slots = [PAGES + 1]
        media = Memory(schema, slots, slots, layout="layer_first")
        cache = Cache(schema, slots, slots, media=media)
        lease = cache.admit(tokens, chunk=len(tokens))
        cache.commit(lease, tokens)
        cache.release(lease)
        while not cache.transfers.idle or not cache.transfers.moved["save"]:
            cache.tick()
        for _ in range(8):  # the last load is under way when the script ends
            cache.evict("device")
            lease = cache.admit(tokens, chunk=1)
            cache.release(lease)
            if _ < 7:
                while not cache.transfers.idle:
                    cache.tick()
        print(len(cache.transfers.tickets))
    """
    done = process(script, LAYERS=8, PAGES=24)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n" * 4, "nothing was under way"
    assert done.stderr == ""


def test_a_cache_is_closed_at_exit(tmp_path: Path) -> None:
    """Pages that are not stored yet, over 4 MiB in one write, are stored."""
    script = """
        store = FileStore(Path(DIRECTORY), sizes)
        slots = [PAGES + 1]
        cache = Cache(schema, slots, [2 * PAGES], store, media=Memory(schema, slots, [2 * PAGES]))
        atexit.register(cache.close)
        lease = cache.admit(tokens, chunk=len(tokens))
        cache.commit(lease, tokens)
        cache.release(lease)
    """
    options = {"LAYERS": 2, "PAGES": 24, "DIRECTORY": str(tmp_path)}  # 256 KiB a page
    done = process(script, **options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    check = """
        store = FileStore(Path(DIRECTORY), sizes)
        slots = [PAGES + 1]
        cache = Cache(schema, slots, [2 * PAGES], store, Policy(prefetch_min_tokens=0))
        prefetch = cache.prefetch(tokens)
        while not cache.ready(prefetch):
            cache.tick()
        lease = cache.admit(tokens, chunk=1, prefetch=prefetch)
        cache.close()
    """
    found: dict[str, Any] = {}
    exec(whole(check, **options), found)
    assert found["lease"].pages == 24
