"""The schema: sizes, fingerprints and keys."""

import hashlib
import struct
from dataclasses import replace

import pytest
from request import true_key
from schemas import group

from kvkeep.core.policy import Policy
from kvkeep.schema import (
    SECTOR,
    Component,
    ConfigError,
    Group,
    Identity,
    Schema,
    chain_keys,
    root_key,
)

K = Component("k", (0, 3), (4, 8), "BF16")
FULL = Group("full", (K, replace(K, name="v", dtype="F8_E4M3")))
SCHEMA = Schema(Identity("model"), 4, (FULL, Group("draft", (K,), sharded=False)))


def test_sizes() -> None:
    assert K.layer_bytes == 64
    assert K.page_bytes == 128
    assert FULL.page_bytes == 192
    assert FULL.record_bytes == SECTOR
    assert Group("big", (replace(K, shape=(513,), layers=(0,), dtype="U8"),)).record_bytes == 1024


@pytest.mark.parametrize(
    ("tail", "pages", "needed"),
    [(None, 3, (0, 3)), (2, 3, (1, 3)), (2, 1, (0, 1)), (1, 0, (0, 0)), (None, 0, (0, 0))],
)
def test_needed(tail: int | None, pages: int, needed: tuple[int, int]) -> None:
    assert group("g", tail).needed(pages) == range(*needed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(K, dtype="F7"), "unknown dtype 'F7'"),
        (lambda: replace(K, layers=()), "no layers"),
        (lambda: replace(K, shape=()), "or an empty shape"),
        (lambda: replace(K, shape=(2, 0)), "empty shape"),
        (lambda: Group("g", ()), "no components"),
        (lambda: group("g", tail=0), "tail"),
        (lambda: replace(SCHEMA, page_tokens=0), "page size"),
        (lambda: replace(SCHEMA, groups=()), "at least one group"),
        (lambda: replace(SCHEMA, groups=(FULL, FULL)), "must differ"),
        (
            lambda: Policy(missing="maybe"),
            "missing must be one of strict, lenient, stale, not 'maybe'",
        ),
        (lambda: Policy(prefetch="never"), "prefetch must be one of wait_complete, "),
        (lambda: Policy(write="later"), "write must be one of write_through, "),
    ],
)
def test_nonsense_is_refused_at_construction(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_fingerprint_names_everything_that_bytes_depend_on() -> None:
    prints = {
        schema.fingerprint(schema.groups[0])
        for schema in (
            SCHEMA,
            replace(SCHEMA, identity=Identity("other")),
            replace(SCHEMA, identity=Identity("model", rank=1, world=2)),
            replace(SCHEMA, page_tokens=8),
            replace(SCHEMA, groups=(replace(FULL, source="digest"),)),
            replace(SCHEMA, groups=(replace(FULL, components=(K,)),)),
        )
    }
    assert len(prints) == 6
    assert {len(fingerprint) for fingerprint in prints} == {16}


def test_how_a_group_is_used_does_not_name_its_bytes() -> None:
    """``working`` and ``required`` do not change a group's records."""
    for change in ({"working": 5, "tail": 1}, {"required": False}):
        other = replace(FULL, **change)
        assert SCHEMA.fingerprint(other) == SCHEMA.fingerprint(FULL)


def test_snapshots_need_a_tail() -> None:
    with pytest.raises(ConfigError, match="snapshots"):
        replace(FULL, working=1)


def test_ranks_share_what_is_not_sharded() -> None:
    ranks = [replace(SCHEMA, identity=Identity("model", rank=r, world=2)) for r in range(2)]
    full, draft = ([s.fingerprint(s.groups[g]) for s in ranks] for g in range(2))
    assert full[0] != full[1]
    assert draft[0] == draft[1]


def test_keys_chain() -> None:
    """A key depends on its namespace and on every token up to its page's end."""
    tokens = struct.pack("<5i", 1, 2, 3, -4, 5)
    keys = chain_keys(root_key("a"), tokens, 2)
    assert keys == [true_key(("a", (1, 2))), true_key(("a", (1, 2, 3, -4)))]
    assert chain_keys(keys[0], memoryview(tokens)[8:], 2) == keys[1:]
    assert chain_keys(root_key("b"), tokens, 2)[0] != keys[0]
    assert keys[1] == hashlib.sha256(keys[0] + tokens[8:16]).digest()


def test_namespaces_do_not_run_into_tokens() -> None:
    assert len({root_key(name) for name in ("", "a", "b", "ab", "é", "1:a")}) == 6
