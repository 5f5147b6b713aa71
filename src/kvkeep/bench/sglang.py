"""SGLang's tree cores and its file backend behind the same operations (as of 0.5.23).

A core is driven as SGLang's own cache drives it: keys are arrays made off the clock, inserting
frees the indices of what was there already, and evicting frees indices to its allocator. Of the
two ways that allocator frees, it has the cheap one, a list of what came back; by default it copies
all free page numbers at each call, which says nothing about a tree.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..schema import ConfigError
from .files import Bodies
from .load import Load
from .measure import Step


def add_peer(directory: Path) -> None:
    """Make ``import sglang`` find the copy in ``directory``.

    Raises:
        ConfigError: it cannot be imported from there; the message says what is missing.
    """
    sys.path.append(str(directory))
    try:
        import sglang.srt.mem_cache.unified_radix_cache  # noqa: F401
    except Exception as error:
        sys.path.remove(str(directory))
        raise ConfigError(f"SGLang in {directory} cannot be imported: {error}") from error


class SGLang:
    """``UnifiedRadixCache`` over one tree core.

    Args:
        core: "rust" or "python".
    """

    def __init__(self, load: Load, core: str) -> None:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        size = load.page_tokens
        self._allocator = PagedTokenToKVPoolAllocator(
            load.tokens.size + size, size, torch.bfloat16, "cpu", None, need_sort=True
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self._allocator,
            page_size=size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
        self._cache: Any = UnifiedRadixCache(params)
        if core == "rust" and "Rust" not in type(self._cache.tree_core).__name__:
            raise ConfigError("SGLang has no Rust core for this PyTorch")
        self._load = load
        self._rows = [torch.empty(0, dtype=torch.int64)] * load.sequences
        self._keys = [array("q", tokens.astype(np.int64).tobytes()) for tokens in load.tokens]

    def begin(self, i: int) -> int:
        found = self._cache.match_prefix(self._params(i))
        self._rows[i] = self._cache.path_device_indices(found.last_device_node)
        return len(self._rows[i])

    def extend(self, i: int, stop: int) -> Step:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        cache, allocator, start = self._cache, self._allocator, len(self._rows[i])
        row = torch.cat((self._rows[i], allocator.alloc(stop - start)))
        self._rows[i] = row
        key = RadixKey(self._keys[i][:stop])
        params = InsertParams(key=key, value=row, inserted_len=start)

        def step() -> None:
            known = cache.insert(params).prefix_len
            allocator.free_segment(row[start:known], start_pos=start)

        return step

    def match(self, i: int) -> Step:
        core, params = self._cache.tree_core, self._params(i)
        return lambda: core.match_prefix(params)

    def match_list(self, i: int) -> Step:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        core, tokens = self._cache.tree_core, self._load.tokens[i].tolist()
        return lambda: core.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))

    def slots(self, i: int) -> Step:
        cache, core, params = self._cache, self._cache.tree_core, self._params(i)
        return lambda: cache.path_device_indices(core.match_prefix(params).last_device_node)

    def evict(self, pages: int) -> Step:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        cache, params = self._cache, EvictParams(num_tokens=pages * self._load.page_tokens)
        return lambda: cache.evict(params)

    def resident(self) -> int:
        return int(self._cache.evictable_size()) // self._load.page_tokens

    def _params(self, i: int) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return MatchPrefixParams(key=RadixKey(self._keys[i]))


class SGLangCalls(SGLang):
    """What its scheduler calls for a request: a commit (``checkpoint``) inserts, matches again,
    takes the indices that are in the tree, and moves its lock."""

    def hit(self, i: int) -> Step:
        params = self._params(i)

        def step() -> None:
            node = self._cache.match_prefix(params).last_device_node
            lock = self._cache.lock(node)
            self._cache.path_device_indices(node)
            self._cache.unlock(lock)

        return step

    def begin(self, i: int) -> int:
        self._i, found = i, super().begin(i)
        self._lock = self._cache.lock(self._cache.match_prefix(self._params(i)).last_device_node)
        return found

    def commit(self, stop: int) -> Step:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        insert = self.extend(self._i, stop)
        params = MatchPrefixParams(key=RadixKey(self._keys[self._i][:stop]))

        def step() -> None:
            insert()
            node = self._cache.match_prefix(params).last_device_node
            self._cache.path_device_indices(node)
            self._cache.unlock(self._lock)
            self._lock = self._cache.lock(node)

        return step

    def end(self) -> None:
        self._cache.unlock(self._lock)

    def close(self) -> None:
        pass  # nothing runs


class SGLangFiles:
    """``HiCacheFile``: a file per value, read and written one by one."""

    def __init__(self, directory: Path, size: int) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "bench")
        self._backend: Any = HiCacheFile(config, str(directory))

    def write(self, first: int, bodies: Bodies) -> Step:
        values = [torch.frombuffer(body, dtype=torch.uint8) for body in bodies]
        return partial(self._backend.batch_set, self._keys(first, len(bodies)), values)

    def read(self, first: int, out: Bodies) -> Step:
        targets = [torch.frombuffer(body, dtype=torch.uint8) for body in out]
        return partial(self._backend.batch_get, self._keys(first, len(out)), targets)

    def close(self) -> None:
        pass  # it keeps nothing open

    def _keys(self, first: int, count: int) -> list[str]:
        return [hashlib.sha256(b"%d" % i).hexdigest() for i in range(first, first + count)]
