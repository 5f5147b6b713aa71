"""Scheduling: admission order, preemption, and which requests a failure affects."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rig import PATIENCE, Pair, Rig, prompt

from kvkeep.engine import core
from kvkeep.engine.build import open_store
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.core import Engine
from kvkeep.engine.messages import Ask, Failed, Figures, Finished, Generate, Reply, Sampling
from kvkeep.engine.request import RequestState
from kvkeep.engine.runner import Advance, Work
from kvkeep.media.arrival import Arrival
from kvkeep.schema import Closed, Key, Schema
from kvkeep.stores.base import Store
from kvkeep.testing.wrappers import WrapperStore


def test_first_come_first_served(tiny: Pair) -> None:
    for options in ({"max_running": 2}, {"device_tokens": 256}):
        order: list[str] = []
        with Rig(tiny, **options) as rig:
            rig.on_output = lambda seq: order.append(seq.id)  # noqa: B023
            names = [rig.send(prompt(64, i), 16) for i in range(8)]
            rig.run()
            assert list(dict.fromkeys(order)) == names
            assert rig.figure("preemptions_total") == 0


def test_a_completed_read_from_storage_wakes_the_engine(
    tiny: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "_BUSY_SECONDS", 10 * PATIENCE)
    with Rig(tiny, storage_dir=tmp_path) as rig:
        rig.ask(prompt(200), 2)
        rig.evict("device", "host")
        assert rig.ask(prompt(200), 2).cached["storage"] == 192


@pytest.mark.parametrize("prefetch", ["best_effort", "timeout"])
def test_pages_prefetched_while_a_request_waited_are_used(
    tiny: Pair, tmp_path: Path, prefetch: str
) -> None:
    options = {"prefetch_seconds": 0.0, "prefetch_seconds_per_1k": 0.0, "max_running": 1}
    with Rig(tiny, storage_dir=tmp_path, prefetch=prefetch, **options) as rig:
        rig.ask(prompt(200), 2)
        rig.evict("device", "host")
        rig.send(prompt(20), 200)
        second = rig.send(prompt(200), 2)
        for turn in rig.turns():
            while turn > 20 and rig.figure("transfers_pending"):
                rig.engine.cache.tick()  # the lanes take as long as they like
                time.sleep(0.001)
        assert rig.answers[second].cached["storage"] == 192


def test_a_request_whose_lease_is_released_starts_over(tiny: Pair) -> None:
    with Rig(tiny) as rig:
        alone = rig.ask(prompt(100), 40).tokens
        for others in (0, 2):
            names = [rig.send(prompt(100), 40)] + [
                rig.send(prompt(50, i), 40) for i in range(others)
            ]
            for turn in rig.turns():
                if turn == 4:
                    lease = rig.engine.scheduler.running[0].lease
                    assert lease is not None
                    rig.engine.cache.release(lease)
            assert rig.answers[names[0]].tokens == alone
            assert rig.answers[names[0]].finished.usage.preemptions == 1
            assert not any(rig.answers[name].finished.usage.preemptions for name in names[1:])
        rig.check_idle()


def test_a_request_that_lost_a_load_holds_up_no_other(tiny: Pair) -> None:
    """It waits until the rest of its hit is settled."""
    failed = Arrival()
    failed.fail()
    with Rig(tiny) as rig:
        alone = [rig.ask(prompt(30, i), 6).tokens for i in range(2)]
        lost, other = (rig.send(prompt(30, i), 6) for i in range(2))
        for turn in rig.turns():
            running = {seq.id: seq for seq in rig.engine.scheduler.running}
            lease = running[lost].lease if lost in running else None
            if turn == 0:
                assert lease
                lease.arriving.append(failed)
                made = len(rig.answers[lost].tokens)
            elif lease and lease.lost and rig.answers[other].end:
                assert len(rig.answers[lost].tokens) == made > 0
                lease.arriving.clear()
        assert [rig.answers[name].tokens for name in (lost, other)] == alone
        rig.check_idle()


def test_requests_that_fit_alone_are_served_together(tiny: Pair) -> None:
    """Prompt and new tokens of each request fill the whole pool."""
    for draft in (True, False):
        with Rig(tiny, draft=draft, device_tokens=160, chunked_prefill_size=48) as rig:
            most = rig.engine.info.context_length
            names = [
                rig.send(prompt(length, i), most - length)
                for i, length in enumerate((most - 1, 16, most // 2, 15, most - 17, 1))
            ]
            answers = rig.run(*names)
            assert all(answer.finished.reason == "length" for answer in answers)
            assert rig.figure("preemptions_total") > 0
            rig.check_idle()


def test_a_long_prompt_does_not_stall_decoding(tiny: Pair) -> None:
    with Rig(tiny, draft=False, chunked_prefill_size=32) as rig:
        short = rig.send(prompt(10), 60)
        for turn in rig.turns():
            if turn == 5:
                long = rig.send(prompt(800), 4)
            made = len(rig.answers[short].tokens)
            assert made >= min(turn, 60)  # one token per turn, during the long prompt's 25 chunks
            if turn == 20:
                assert not rig.answers[long].tokens
        assert len(rig.answers[long].tokens) == 4


def test_prompts_under_way_count_in_full(tiny: Pair) -> None:
    """Admission does not promise slots that a running prompt's later chunks will need."""
    with Rig(tiny, draft=False, device_tokens=1200, chunked_prefill_size=64) as rig:
        rig.run(*[rig.send(prompt(300, i), 16) for i in range(12)])
        assert rig.figure("preemptions_total") == 0
        assert rig.figure("step_sequences_total") > 2 * rig.figure("steps_total")


class Gate(WrapperStore):
    """Blocks reads until ``open`` is set."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.waiting = threading.Event()

    def read(self, keys: Sequence[Key], out: Sequence[memoryview]) -> list[bool]:
        self.waiting.set()
        self.open.wait()
        return super().read(keys, out)


def test_requests_overtake_one_with_a_slow_prefetch(tiny: Pair, tmp_path: Path) -> None:
    gates: list[Gate] = []

    def gated(config: EngineConfig, schema: Schema) -> Store:
        store = open_store(config, schema)
        assert store is not None
        gates.append(Gate(store))
        return gates[0]

    stored, new = prompt(100), prompt(12)
    with Rig(tiny, storage_dir=tmp_path) as rig:
        expected = rig.ask(stored).tokens
    with Rig(tiny, storage_dir=tmp_path, store=gated) as rig:
        slow, fast = rig.send(stored), rig.send(new)
        for _ in rig.turns():
            if rig.answers[fast].end and not gates[0].open.is_set():
                assert gates[0].waiting.wait(60)
                assert not rig.answers[slow].tokens
                gates[0].open.set()
        assert rig.answers[slow].tokens == expected
        assert rig.answers[slow].cached["storage"] == 96
        rig.check_idle()


def test_preemption_keeps_whole_pages(tiny: Pair) -> None:
    """With a host tier, a preempted request recomputes at most two pages."""
    with Rig(tiny, device_tokens=192, chunked_prefill_size=32) as rig:
        seen: list[RequestState] = []
        rig.on_output = lambda seq: seen.append(seq) if seq not in seen else None
        for i in range(8):
            rig.send(prompt(20 + i), 60)
        rig.run()
        preemptions = rig.figure("preemptions_total")
        assert preemptions == sum(seq.preemptions for seq in seen) > 0
        assert rig.figure("recomputed_tokens_total") <= 2 * 16 * preemptions


class FailingRunner:
    """Fails every step of the request ``name`` after its third new token."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def step(self, work: Sequence[Work]) -> list[Advance]:
        if any(one.seq.id == self._name and one.seq.generated >= 3 for one in work):
            self._inner.step(work)
            raise RuntimeError("a planted failure")
        found: list[Advance] = self._inner.step(work)
        return found


def test_a_failed_step_fails_only_its_requests(tiny: Pair) -> None:
    with Rig(tiny, max_running=2) as rig:
        expected = [rig.ask(prompt(50, i), namespace="expected").tokens for i in range(4)]
        names = [rig.send(prompt(50, i)) for i in range(4)]
        runner = FailingRunner(rig.engine._runner, names[0])
        rig.engine._runner = runner  # type: ignore[assignment]
        answers = rig.run(*names)
        for answer in answers[:2]:
            assert isinstance(answer.end, Failed)
            assert answer.end.kind == "RuntimeError"
        assert [answer.tokens for answer in answers[2:]] == expected[2:]
        rig.check_idle()
        again = rig.run(*[rig.send(prompt(50, i)) for i in range(2)])
        assert [answer.tokens for answer in again] == expected[:2]


class BrokenTokenizer:
    """A tokenizer that cannot detokenize."""

    @property
    def backend_tokenizer(self) -> Any:
        raise LookupError("a planted failure")


def test_any_string_is_a_namespace(tiny: Pair, tmp_path: Path) -> None:
    """Including lone surrogates, which are not valid Unicode."""
    with Rig(tiny, storage_dir=tmp_path) as rig:
        assert rig.ask(prompt(40), namespace="\ud800").finished.reason == "length"
        assert rig.ask(prompt(40), namespace="\ud801").finished.usage.cached_tokens["device"] == 0
        assert rig.ask(prompt(40), namespace="\ud800").finished.usage.cached_tokens["device"] == 32


def test_a_failing_request_does_not_affect_others(tiny: Pair) -> None:
    with Rig(tiny) as rig:
        good = rig.send(prompt(41))
        for turn in rig.turns():
            if turn == 3:
                rig.engine.tokenizer, kept = BrokenTokenizer(), rig.engine.tokenizer
                bad = rig.send(prompt(40, 1))
            if turn == 6:
                rig.engine.tokenizer = kept
        assert rig.answers[good].finished.reason == "length"
        assert isinstance(rig.answers[bad].end, Failed)
        rig.check_idle()


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        ([], "RequestError"),
        ([3, 128], "RequestError"),
        ([-1], "RequestError"),
        (prompt(300), "PromptTooLong"),
    ],
)
def test_invalid_requests_are_refused(tokens: list[int], kind: str, tiny: Pair) -> None:
    with Rig(tiny, device_tokens=256) as rig:
        answer = rig.ask(tokens)
        assert isinstance(answer.end, Failed)
        assert answer.end.kind == kind
        assert rig.ask(prompt(20)).finished.usage.completion_tokens == 16
        rig.check_idle()


def test_the_context_limits_new_tokens(tiny: Pair) -> None:
    with Rig(tiny, device_tokens=256, context_length=100) as rig:
        assert len(rig.ask(prompt(90), 50).tokens) == 10


def generate(name: str, new: int = 10**6) -> Generate:
    sampling = Sampling(temperature=0.0, max_tokens=new, ignore_eos=True)
    return Generate(id=name, tokens=prompt(20), sampling=sampling)


@pytest.mark.parametrize("started", [True, False])
def test_close_fails_all_requests(started: bool, tiny: Pair) -> None:
    engine = Engine(EngineConfig(model=tiny.target, draft=tiny.draft, page_size=16))
    replies: list[Reply] = []
    running = threading.Event()

    def hear(reply: Reply) -> None:
        replies.append(reply)
        running.set()

    engine.listen(hear)
    names = [f"r{i}" for i in range(8)]
    engine.send(generate(names[0]))
    if started:
        engine.start()
        assert running.wait(60)
    for name in names[1:]:
        engine.send(generate(name))
    engine.send(Ask("ask"))
    engine.close()
    engine.close()
    ends = {reply.id: reply for reply in replies if isinstance(reply, Failed | Figures)}
    assert sorted(ends) == ["ask", *names]
    failed = [reply for reply in ends.values() if isinstance(reply, Failed)]
    assert {reply.kind for reply in failed} == {"Closed"}
    assert not any(isinstance(reply, Finished) for reply in replies)
    with pytest.raises(Closed):
        engine.send(Ask("late"))
