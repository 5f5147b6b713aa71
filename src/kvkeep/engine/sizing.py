"""How many slots each group of state gets in each memory tier."""

from __future__ import annotations

import torch

from ..schema import ConfigError, Group, Schema
from .config import EngineConfig

_CPU_POOL_BYTES = 1 << 30  # device pool on a CPU when nothing is said
_CPU_POOL_TOKENS = 1 << 16


def device_slots(
    config: EngineConfig, schema: Schema, device: torch.device, lookahead: int
) -> list[int]:
    """Slots of each group on the device.

    A group that needs every page gets the pool's tokens; one with a sliding window a share of
    them, and at least what one request holds while a chunk is computed; running state a slot for
    each request and some for snapshots.

    Args:
        lookahead: tokens past the known ones that a decoding step may write.

    Raises:
        ConfigError: the memory does not hold one page.
    """
    fixed = [_fixed(config, group, lookahead) for group in schema.groups]
    share = [pool_share(config, group) for group in schema.groups]
    if config.device_tokens is not None:
        pages = config.device_tokens // config.page_size
    else:
        sizes = [group.page_bytes for group in schema.groups]
        room = _room(config, device) - sum(a * b for a, b in zip(sizes, fixed, strict=True))
        pages = int(room / sum(a * b for a, b in zip(sizes, share, strict=True)))
        if device.type == "cpu":
            pages = min(pages, _CPU_POOL_TOKENS // config.page_size)
    if pages < 1:
        raise ConfigError(
            "the device pool does not hold one page; raise --max-total-tokens or "
            "--mem-fraction-static, or lower --page-size"
        )
    return [max(few, int(part * pages)) for few, part in zip(fixed, share, strict=True)]


def pool_share(config: EngineConfig, group: Group) -> float:
    """Slots per page of the pool."""
    if group.working:
        return 0.0
    return 1.0 if group.tail is None else config.window_ratio


def host_slots(config: EngineConfig, schema: Schema, device: list[int]) -> list[int]:
    """Slots of each group on the host: in proportion to the device's."""
    ratio = config.host_ratio
    if config.host_bytes is not None:
        sizes = [group.record_bytes for group in schema.groups]
        ratio = config.host_bytes / sum(a * b for a, b in zip(sizes, device, strict=True))
    return [int(ratio * slots) for slots in device]


def context_length(
    config: EngineConfig, schema: Schema, device: list[int], longest: int, lookahead: int
) -> int:
    """The longest sequence that the model and the device pool can hold.

    Args:
        device: slots of each group.
        longest: tokens that the model was made for.

    Raises:
        ConfigError: more was asked for.
    """
    whole = [n for group, n in zip(schema.groups, device, strict=True) if group.tail is None]
    pool = min(whole) * config.page_size - lookahead if whole else longest
    wanted = min(longest, pool) if config.context_length is None else config.context_length
    if wanted > longest:
        raise ConfigError(
            f"a context of {wanted} tokens was asked for; the model was made for {longest}"
        )
    if not 2 <= wanted <= pool:
        raise ConfigError(
            f"a device pool of {pool + lookahead} tokens does not hold a context of {wanted} "
            f"tokens and {lookahead} to look ahead; raise --max-total-tokens or lower "
            "--context-length"
        )
    return wanted


def _fixed(config: EngineConfig, group: Group, lookahead: int) -> int:
    """The fewest slots, whatever the pool's size."""
    if group.working:
        return config.state_slots or config.max_running * (group.working + 2)
    if group.tail is None:
        return 1
    step = max(config.chunked_prefill_size, lookahead)
    return group.tail + -(-step // config.page_size) + 2


def _room(config: EngineConfig, device: torch.device) -> int:
    """Bytes for pools."""
    if device.type == "cpu":
        return _CPU_POOL_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * config.mem_fraction)
