"""What several test modules of the core ask for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from real_lanes import Bench


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes benches, and closes them."""
    benches: list[Bench] = []

    def make(*args, **kwargs) -> Bench:
        benches.append(Bench(*args, **kwargs))
        return benches[-1]

    yield make
    for made in benches:
        made.close()
