"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

DONE = b"[DONE]"


async def events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event up to OpenAI's ``[DONE]``.

    Everything after ``[DONE]`` is read and ignored, because a connection whose response was not
    read to its end cannot be used again. An event that the stream ends in counts.

    Args:
        chunks: the body, cut anywhere: in a line, in a line end, in a character.
    """
    rest, data, done, after_return = b"", list[bytes](), False, False
    async for chunk in chunks:
        if after_return:  # "\r\n", cut in the middle, ends one line
            chunk = chunk.removeprefix(b"\n")
        after_return = chunk.endswith(b"\r")
        lines = (rest + chunk).splitlines(keepends=True)
        rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        for line in lines:
            if field := line.rstrip(b"\r\n"):
                data += _data(field)
                continue
            event, data = b"\n".join(data), []
            done = done or event == DONE
            if event and not done:
                yield event
    event = b"\n".join([*data, *_data(rest)])
    if event not in (b"", DONE) and not done:
        yield event


def _data(line: bytes) -> list[bytes]:
    """What a line adds to the data of its event. Comments and other fields add nothing."""
    name, _, value = line.partition(b":")
    return [value.removeprefix(b" ")] if name == b"data" else []
