"""kvkeep.bench.serving.events"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvkeep.bench.serving.events import events


async def parsed(stream: bytes, size: int) -> list[str]:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(stream), size):
            yield stream[at : at + size]

    return [data.decode() async for data in events(chunks())]


@pytest.mark.anyio
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
async def test_events_wherever_the_stream_is_cut(size: int, end: str) -> None:
    lines = [
        ": a comment", "", "data: één", "", "event: x", "id: 1", "data:two", "data:  lines", "",
        "data", "", ":", "", "data: {}", "", "data: [DONE]", "", "data: too late", "", "",
    ]  # fmt: skip
    stream = end.join(lines).encode()
    assert await parsed(stream, size) == ["één", "two\n lines", "{}"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("", []),
        ("data: 1\n\ndata: 2", ["1", "2"]),
        ("data: 1\n\ndata: [DONE]", ["1"]),
        ("data: [DONE]\n\ndata: 2", []),
        ("data: 1\n\n\n\n: x", ["1"]),
    ],
)
async def test_a_stream_may_end_anywhere(stream: str, expected: list[str]) -> None:
    assert await parsed(stream.encode(), 4) == expected
