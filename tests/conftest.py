"""Settings that every test runs with."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

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


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Measure coverage by the tests of what is measured: it makes all others half as fast."""
    for item in items:
        where = item.path.relative_to(HERE)
        if where.parts[0] != "core" and not where.name.startswith(STORES):
            item.add_marker("no_cover")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
