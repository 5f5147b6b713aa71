"""The file store while all is well: protocol, quota, recycling, several processes in turn."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvkeep.schema import Closed, ConfigError, Key
from kvkeep.stores.file import FileStore
from kvkeep.testing.stores import LARGE, SIZES, SMALL, StoreConformance, body, key, read, write

SMALL_SLOT, LARGE_SLOT = 8192, 16384


class TestFileStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FileStore:
        return FileStore(tmp_path, SIZES, 4 << 20)


class TestFileStoreWithoutAQuota(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FileStore:
        return FileStore(tmp_path / "made" / "for it", SIZES)
