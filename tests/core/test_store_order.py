"""The file store publishes a record only after its bytes are written."""

from pathlib import Path

import pytest

from kvkeep.stores.file import FileStore
from kvkeep.testing.stores import SIZES, key, read, write


def test_bytes_come_before_the_promise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second reader probes while the bytes are being written."""
    writer, reader = FileStore(tmp_path, SIZES), FileStore(tmp_path, SIZES)
    promised: list[bool] = []
    put = writer._put

    def watched(*args):
        promised.extend(reader.probe([key(1)]))
        return put(*args)

    monkeypatch.setattr(writer, "_put", watched)
    assert write(writer, [key(1)]) == [True]
    assert promised == [False]
    assert read(reader, [key(1)]) == [True]
    writer.close()
    reader.close()
