"""Settings that every test runs with, and a server without a model.

Fixtures import what they need: tests of a GPU run where little is installed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import httpx
    from fake_engine import FakeEngine

CORE = Path(__file__).parent / "core"
STORES = ("test_file_store", "test_index", "test_record", "test_slab", "test_store")

# Before any test module imports torch: for tensors as small as these, threads are a loss.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

with suppress(ImportError):  # what needs a GPU is tested where little is installed
    from hypothesis import HealthCheck, Phase, settings

    # The same examples in every run, however slow the machine is.
    settings.register_profile(
        "same",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    # For who asks whether a test fails, not where: shrinking may take minutes.
    settings.register_profile("verdict", settings.get_profile("same"), phases=[Phase.generate])
    settings.load_profile("same")


def pytest_configure() -> None:
    """While modules are imported, garbage collections find nothing."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is there now stays: collections need not look at it again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries clean up at exit
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Measure coverage by the tests of what is measured."""
    for item in items:
        if CORE not in item.path.parents and not item.path.name.startswith(STORES):
            item.add_marker("untraced")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Coverage makes a test take twice as long. Where it proves nothing, it is off.

    The marker ``no_cover`` of pytest-cov does nothing in workers of xdist: they start coverage
    twice, and it stops one.
    """
    tracer = sys.gettrace()
    if tracer is None or not item.get_closest_marker("untraced") or not _measures(item.config):
        return (yield)
    of_threads = threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
        threading.settrace(of_threads)  # type: ignore[arg-type]


def _measures(config: pytest.Config) -> bool:
    """Whether it is coverage that traces, and no debugger."""
    return bool(config.getoption("cov_source", None))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """An engine without a model."""
    from fake_engine import FakeEngine

    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
async def http(engine: FakeEngine, anyio_backend: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server on that engine, in this process."""
    import httpx
    from fake_engine import FakeTokenizer

    from kvkeep.engine.client import EngineClient
    from kvkeep.server.app import create_app

    app = create_app(EngineClient(engine), FakeTokenizer())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://kvkeep") as client:
        yield client


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    """The address of a server on that engine, on a free port."""
    from real_server import serving

    with serving(engine) as port:
        yield f"http://127.0.0.1:{port}"
