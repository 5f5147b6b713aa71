"""vLLM's KVCacheManager behind the same operations (read and run as of 0.32).

It differs in what a call does. A request hashes its tokens when it is made, so ``match`` begins
with hashes and only ``match_list`` counts them. ``allocate_slots`` takes blocks and caches them
at once, so ``extend`` allocates, too. Blocks are evicted as they are allocated, so ``evict``
allocates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..schema import ConfigError
from .load import Load
from .measure import Step


def need_peer() -> None:
    """Raise ConfigError unless vLLM can be imported; the message says what is missing."""
    try:
        import vllm.v1.core.kv_cache_manager
        import vllm.v1.request  # noqa: F401
    except Exception as error:
        raise ConfigError(f"vLLM cannot be imported: {error}") from error


class VLLM:
    """``KVCacheManager`` with one group of full attention."""

    def __init__(self, load: Load) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        size = load.page_tokens
        spec = kv_cache_interface.FullAttentionSpec(
            block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(size, sha256)
        config = kv_cache_interface.KVCacheConfig(
            num_blocks=load.pages + 1,
            kv_cache_tensors=[],
            kv_cache_groups=[kv_cache_interface.KVCacheGroupSpec(["0"], spec)],
        )
        self._manager: Any = KVCacheManager(config, load.length + size, size, size)
        self._pool = self._manager.block_pool
        self._load = load
        self._lists = [tokens.tolist() for tokens in load.tokens]
        self._requests: list[Any] = [self._request(i) for i in range(load.sequences)]
        self._found: dict[int, Any] = {}  # what a request that has just come begins with
        self._served: list[Any] = []  # requests to be freed
        self._taken: list[Any] = []  # blocks that were evicted

    def begin(self, i: int) -> int:
        self._settle()
        request = self._requests[i]
        blocks, count, _ = self._manager.get_computed_blocks(request)
        if count + self._load.page_tokens == self._load.length:
            return self._load.length  # it never hits the last block of a prompt
        self._found[i] = blocks
        request.num_computed_tokens = 0
        return int(count)

    def extend(self, i: int, stop: int) -> Step:
        manager, request = self._manager, self._requests[i]
        blocks = self._found.pop(i, None)
        known = len(blocks.blocks[0]) * self._load.page_tokens if blocks else 0
        new = stop - request.num_computed_tokens - known

        def step() -> None:
            manager.allocate_slots(request, new, known, blocks)
            request.num_computed_tokens = stop

        if stop == self._load.length:
            self._served.append(request)
        return step

    def match(self, i: int) -> Step:
        manager, request = self._manager, self._requests[i]
        return lambda: manager.get_computed_blocks(request)

    def match_list(self, i: int) -> Step:
        manager = self._manager
        return lambda: manager.get_computed_blocks(self._request(i))

    def slots(self, i: int) -> Step:
        manager, request = self._manager, self._requests[i]
        return lambda: np.array(manager.get_computed_blocks(request)[0].get_block_ids()[0])

    def evict(self, pages: int) -> Step:
        self._settle()
        queue = self._pool.free_block_queue
        while queue.fake_free_list_head.next_free_block.block_hash is None:
            self._taken += self._pool.get_new_blocks(1)  # it was empty: not what is measured

        def step() -> None:
            self._taken += self._pool.get_new_blocks(pages)

        return step

    def resident(self) -> int:
        return len(self._pool.cached_block_hash_to_block)

    def _request(self, i: int) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=1)
        return Request(str(i), self._lists[i], sampling, None, block_hasher=self._hasher)

    def _settle(self) -> None:
        """Requests that are through let go of their blocks, and evicted blocks are free."""
        for request in self._served:
            self._manager.free(request)
        self._pool.free_blocks(self._taken)
        self._served, self._taken = [], []
