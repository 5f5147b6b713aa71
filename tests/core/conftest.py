"""Fixtures that several test modules of the core share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from real_lanes import Bench


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes benches, and closes them after the test."""
    benches: list[Bench] = []

    def make(*args, **kwargs) -> Bench:
        benches.append(Bench(*args, **kwargs))
        return benches[-1]

    yield make
    for made in benches:
        made.close()
