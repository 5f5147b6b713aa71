"""kvkeep.engine.client"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest
from fake_engine import FakeEngine, FakeTokenizer

from kvkeep.engine.client import EngineClient, Piece
from kvkeep.engine.messages import (
    Abort,
    Done,
    Finished,
    Generate,
    Output,
    Reply,
    Request,
    Sampling,
    Usage,
)
from kvkeep.schema import Closed, InvariantError, KvkeepError, PromptTooLong, RequestError

pytestmark = pytest.mark.anyio

USAGE = Usage(prompt_tokens=1, completion_tokens=4, cached_tokens={})


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


def ask(name: str, tokens: list[int], limit: int = 4) -> Generate:
    return Generate(id=name, tokens=tokens, sampling=Sampling(max_tokens=limit))


async def test_a_request_yields_its_tokens_and_then_its_end(engine: FakeEngine) -> None:
    client = EngineClient(engine)
    replies = [reply async for reply in client.generate(ask("a", [5, 6]))]
    assert [token for r in replies if isinstance(r, Output) for token in r.tokens] == [5, 6, 5, 6]
    assert [isinstance(r, Finished) for r in replies] == [False] * 4 + [True]
    assert not any(isinstance(message, Abort) for message in engine.received)


async def test_requests_that_run_together_are_told_apart(engine: FakeEngine) -> None:
    client = EngineClient(engine)
    said: dict[str, list[int]] = {"a": [], "b": []}
    ended = []
    async for reply in client.generate(ask("a", [1], 2), ask("b", [2], 5)):
        if isinstance(reply, Output):
            said[reply.id] += reply.tokens
        else:
            ended.append(reply.id)
    assert said == {"a": [1] * 2, "b": [2] * 5}
    assert ended == ["a", "b"]


async def test_text_is_made_of_tokens_and_ends_before_a_stop_token() -> None:
    class Link:
        info, tokenizer = FakeEngine().info, FakeTokenizer()

        def listen(self, callback: Callable[[Reply], None]) -> None:
            self.callback = callback

        def send(self, message: Request) -> None:
            self.callback(Output(message.id, [97, 98], shown=2))
            self.callback(Output(message.id, [99, 100], shown=1))
            self.callback(Finished(message.id, "stop", USAGE))

    pieces = [reply async for reply in EngineClient(Link()).generate(ask("a", [1]))]
    assert pieces == [
        Piece("a", [97, 98], 2, text="ab"),
        Piece("a", [99, 100], 1, text="c"),
        Finished("a", "stop", USAGE),
    ]


async def test_text_held_back_for_a_stop_string_comes_at_the_end(engine: FakeEngine) -> None:
    sampling = Sampling(max_tokens=4, stop=("bc",))
    request = Generate(id="a", tokens=[97, 98], sampling=sampling)
    *pieces, end = [reply async for reply in EngineClient(engine).generate(request)]
    assert isinstance(end, Finished)
    assert [piece.text for piece in pieces if isinstance(piece, Piece)] == ["a", "", "ba", "", "b"]
    assert pieces[-1] == Piece("a", [], 0, text="b")


async def test_closing_the_iterator_aborts(engine: FakeEngine) -> None:
    engine.step_seconds = 0.01
    client = EngineClient(engine)
    async with aclosing(client.generate(ask("a", [1], 1000))) as replies:
        await anext(replies)
    assert engine.aborted()


async def test_cancelling_the_task_aborts_only_what_still_runs(engine: FakeEngine) -> None:
    engine.step_seconds = 0.01
    client = EngineClient(engine)
    first_ended = asyncio.Event()

    async def run() -> None:
        async for reply in client.generate(ask("short", [1], 1), ask("long", [1], 1000)):
            if isinstance(reply, Finished):
                first_ended.set()

    task = asyncio.create_task(run())
    await first_ended.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted()
    assert [m for m in engine.received if isinstance(m, Abort)] == [Abort("long")]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("PromptTooLong", PromptTooLong), ("Closed", Closed), ("SomethingElse", KvkeepError)],
)
async def test_a_failure_is_raised_as_the_class_it_names(
    engine: FakeEngine, kind: str, expected: type[KvkeepError]
) -> None:
    engine.failure = kind, "no"
    with pytest.raises(expected, match="no") as caught:
        _ = [reply async for reply in EngineClient(engine).generate(ask("a", [1]))]
    assert type(caught.value) is expected


async def test_one_failure_aborts_the_others(engine: FakeEngine) -> None:
    engine.failure, engine.fail_after = ("StoreError", "gone"), 3
    with pytest.raises(KvkeepError, match="gone"):
        async for _ in EngineClient(engine).generate(ask("a", [1], 9), ask("b", [1], 9)):
            pass
    assert engine.aborted()


async def test_an_id_in_use_is_refused(engine: FakeEngine) -> None:
    engine.step_seconds = 0.01
    client = EngineClient(engine)
    async with aclosing(client.generate(ask("a", [1], 10_000))) as replies:
        await anext(replies)
        with pytest.raises(RequestError, match="'a' is in use"):
            await anext(client.generate(ask("a", [1])))


async def test_administrative_requests(engine: FakeEngine) -> None:
    client = EngineClient(engine)
    assert await client.evict("host") == 7
    assert (await client.figures())["load"] == 0.5


async def test_a_closed_engine(engine: FakeEngine) -> None:
    client = EngineClient(engine)
    engine.close()
    with pytest.raises(Closed):
        await client.figures()
    with pytest.raises(Closed):
        await anext(client.generate(ask("a", [1])))


async def test_an_answer_of_the_wrong_kind_is_an_error() -> None:
    class Confused:
        info = FakeEngine().info

        def listen(self, callback):  # type: ignore[no-untyped-def]
            self.callback = callback

        def send(self, message):  # type: ignore[no-untyped-def]
            self.callback(Done(message.id))

    with pytest.raises(InvariantError, match="unexpected Done"):
        await EngineClient(Confused()).figures()


def test_replies_for_a_loop_that_is_gone_are_dropped(engine: FakeEngine) -> None:
    """A front end may end its event loop while the engine still answers."""
    engine.step_seconds = 0.01
    client = EngineClient(engine)

    async def leave() -> None:
        await anext(client.generate(ask("a", [1], 1000)))

    asyncio.run(leave())
    assert engine.aborted()
    asyncio.run(client.figures())  # still serves another loop
