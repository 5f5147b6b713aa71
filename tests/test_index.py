"""The index's cached rows, compared with a fresh reader of the same file."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path

import pytest

from kvkeep.schema import Key
from kvkeep.stores.index import Index
from kvkeep.stores.rows import Place, SlabRow
from kvkeep.testing.stores import LARGE, SIZES, SMALL, key

KEYS = [key(n, group) for n in range(12) for group in (SMALL, LARGE)]
LIMIT = 70_000  # bytes: some of them fit


def punched(slab: SlabRow, number: int) -> bool:
    return True


def write(index: Index, keys: list[Key], lose: bool) -> None:
    grant = index.allocate(keys, LIMIT, "me", punched)
    landed = {k: place for n, (k, place) in enumerate(grant.claims.items()) if n or not lose}
    index.publish(landed, [p for p in grant.claims.values() if p not in landed.values()], punched)


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_remembered_as_a_stranger_reads_them(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    mine, other = Index(tmp_path / "index", ()), Index(tmp_path / "index")
    for index in (mine, other):
        index.register("me", SIZES)
    last: dict[Key, Place] = {}
    for _ in range(150):
        index = rng.choice((mine, mine, mine, other))
        some = rng.sample(KEYS, rng.randint(1, 6))
        match rng.randint(0, 6):
            case 0 | 1 | 2:
                write(index, some, lose=rng.random() < 0.3)
            case 3:
                index.delete(some, punched)
            case 4:
                index.shrink(rng.randint(0, LIMIT), punched)
            case 5:
                index.clear({k: place for k, place in last.items() if k in some})
            case 6:
                index.touch(some)
        stranger = Index(tmp_path / "index")
        stranger.ids = mine.ids
        last = stranger.find(KEYS)
        stranger.close()
        asked = rng.sample(KEYS, rng.randint(1, len(KEYS)))
        assert mine.find(asked) == {k: last[k] for k in asked if k in last}
    mine.close()
    other.close()


def test_what_was_taken_back_is_forgotten(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", ())
    index.register("me", SIZES)
    first, second = KEYS[:2]
    claims = index.allocate([first, second], None, "me", punched).claims
    late = claims | {second: claims[second]._replace(sequence=99)}
    index._db.execute(
        "CREATE TRIGGER fails BEFORE UPDATE OF state ON slot WHEN new.state = 0"
        " BEGIN SELECT raise(ABORT, 'planted'); END"
    )
    with pytest.raises(sqlite3.IntegrityError, match="planted"):
        index.publish(late, [claims[second]], punched)  # the first one was there for a moment
    assert index.find([first, second]) == {}
    index.close()


def test_it_does_not_remember_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.stores.places.MOST_SEEN", 3)
    index = Index(tmp_path / "index", ())
    index.register("me", SIZES)
    index.publish(index.allocate(KEYS[:8], None, "me", punched).claims, [], punched)
    for _ in range(3):
        assert index.find(KEYS[:4]).keys() == {*KEYS[:4]}
        assert index.find(KEYS[4:8]).keys() == {*KEYS[4:8]}
        assert sum(map(len, index._places._seen.values())) <= 3 + 4
    index.close()
