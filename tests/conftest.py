"""Settings that every test runs with."""

import os

import pytest

# Before any test module imports torch: for tensors as small as these, threads are a loss.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
