"""Batches that are still on the device when the next one is launched: order, errors, updates, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.api import EngineError, Prompt, RolloutRequest, Sample, Sampling
from drl_engine_local.engine import LocalEngine
from drl_engine_local.result import Launched
from drl_engine_local.schedule import Row
from drl_engine_local.transfer import Download
from drl_engine_local.waiting import Finishing, Job, WaitingRows

SECONDS = 20.0
"""Long enough for a busy machine; nothing here takes it."""


class Late:
    """A batch of one row that is done when told so."""

    def __init__(self, name: str, *, done: bool = False, error: Exception | None = None) -> None:
        self.name = name
        self.copies = SimpleNamespace(done=done)
        self.gate = threading.Event()
        self.error = error
        self.thread = ""
        if done:
            self.gate.set()

    def samples(self, *, since: float) -> list[str]:
        assert self.gate.wait(SECONDS)
        self.thread = threading.current_thread().name
        if self.error is not None:
            raise self.error
        return [self.name]


def job() -> Job:
    sampling = Sampling(num_steps=1, height=32, width=32)
    request = RolloutRequest(
        prompt=Prompt(row=0, text="a sign"),
        group_index=0,
        members=(0,),
        seeds=(0,),
        sampling=sampling,
    )
    return Job(Row(request, 0))


@pytest.fixture
def finishing() -> Iterator[Finishing]:
    made = Finishing()
    yield made
    made.stop()


def take(finishing: Finishing, batch: Late, *jobs: Job) -> None:
    finishing.take(batch, jobs)  # type: ignore[arg-type]


def test_what_is_done_already_is_delivered_by_the_caller(finishing: Finishing) -> None:
    batch, waiting = Late("done", done=True), job()
    take(finishing, batch, waiting)
    assert waiting.done.result(0) == "done"
    assert batch.thread == threading.current_thread().name
    assert not finishing.busy()


def test_a_batch_that_runs_keeps_nobody_waiting_but_those_who_asked_for_it(
    finishing: Finishing,
) -> None:
    batch, waiting = Late("late"), job()
    take(finishing, batch, waiting)
    assert finishing.busy()
    assert not waiting.done.done()
    batch.gate.set()
    assert waiting.done.result(SECONDS) == "late"
    finishing.settle()
    assert not finishing.busy()


def test_batches_are_delivered_in_their_order_even_when_a_later_one_is_done_first(
    finishing: Finishing,
) -> None:
    first, second, order = Late("first"), Late("second", done=True), []
    jobs = [job(), job()]
    for one in jobs:
        one.done.add_done_callback(lambda future: order.append(future.result()))
    take(finishing, first, jobs[0])
    threading.Timer(0.05, first.gate.set).start()
    take(finishing, second, jobs[1])
    finishing.settle()
    assert order == ["first", "second"]


def test_the_host_runs_ahead_of_the_device_by_one_batch_and_no_more(finishing: Finishing) -> None:
    batches = [Late(str(number)) for number in range(3)]
    taken: list[str] = []

    def launch() -> None:
        for batch in batches:
            take(finishing, batch, job())
            taken.append(batch.name)

    thread = threading.Thread(target=launch)
    thread.start()
    time.sleep(0.05)
    assert taken == ["0"]  # the next one was launched too, and waits for this one's end
    batches[0].gate.set()
    deadline = time.monotonic() + SECONDS
    while taken != ["0", "1"] and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert taken == ["0", "1"]
    for batch in batches:
        batch.gate.set()
    thread.join(SECONDS)
    assert taken == ["0", "1", "2"]


def test_what_goes_wrong_on_the_device_is_told_to_its_own_batch(finishing: Finishing) -> None:
    wrong = Late("wrong", error=RuntimeError("CUDA error: an illegal memory access"))
    mine, neighbour, next_one = job(), job(), job()
    take(finishing, wrong, mine, neighbour)
    wrong.gate.set()
    right = Late("right", done=True)
    take(finishing, right, next_one)
    for one in (mine, neighbour):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            one.done.result(SECONDS)
    assert next_one.done.result(SECONDS) == "right"


def test_a_sample_that_nobody_wants_any_more_is_dropped(finishing: Finishing) -> None:
    batch, unwanted = Late("late"), job()
    take(finishing, batch, unwanted)
    unwanted.done.cancel()
    batch.gate.set()
    finishing.settle()
    assert unwanted.done.cancelled()
    unwanted.fail(EngineError("too late"))  # nobody listens, and nothing breaks


def test_a_batch_that_is_not_full_waits_while_the_device_is_busy() -> None:
    busy = threading.Event()
    busy.set()
    waiting = WaitingRows(2, 0.0, busy.is_set)
    first, second = job(), job()
    waiting.add([first])
    threading.Timer(0.05, waiting.add, [[second]]).start()
    assert waiting.batch_with(first) == [first, second]
    threading.Timer(0.05, busy.clear).start()
    waiting.remove([second])
    assert waiting.batch_with(first) == [first]


class SlowDownload(Download):
    """Pictures of a device that takes its time."""

    open = threading.Event()

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)

    @property
    def done(self) -> bool:
        return False

    def wait(self) -> dict[str, Tensor]:
        assert self.open.wait(SECONDS)
        return super().wait()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    monkeypatch.setattr(import_module("drl_engine_local.result"), "Download", SlowDownload)
    SlowDownload.open = threading.Event()
    return SlowDownload.open


def pixels(samples: Sequence[Sample]) -> list[Tensor]:
    return [sample.media.pixels for sample in samples if sample.media is not None]


def test_samples_are_the_same_and_in_order_however_late_they_come(
    engine: LocalEngine,
    request_for: Callable[..., RolloutRequest],
    slow: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [request_for(*range(3 * k, 3 * k + 3), text=f"sign {k}") for k in range(4)]

    async def together() -> list[list[Sample]]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    threading.Timer(0.1, slow.set).start()
    late = asyncio.run(together())
    monkeypatch.undo()
    at_once = asyncio.run(together())
    for ours, theirs in zip(late, at_once, strict=True):
        assert [sample.seed for sample in ours] == [sample.seed for sample in theirs]
        assert all(map(torch.equal, pixels(ours), pixels(theirs)))
        for one, other in zip(ours, theirs, strict=True):
            assert one.trajectory is not None
            assert other.trajectory is not None
            assert torch.equal(one.trajectory.log_probs, other.trajectory.log_probs)


def test_an_update_waits_for_what_is_still_on_the_device(
    engine: LocalEngine, request_for: Callable[..., RolloutRequest], slow: threading.Event
) -> None:
    async def update_meanwhile() -> None:
        asked = asyncio.create_task(engine.generate(request_for(1)))
        while not engine.finishing.busy():
            await asyncio.sleep(0.001)
        update = asyncio.create_task(engine.begin_update(1))
        await asyncio.sleep(0.05)
        assert not update.done()
        slow.set()
        await update
        assert not engine.finishing.busy()
        (sample,) = await asked
        assert sample.version == 0

    asyncio.run(update_meanwhile())


def test_stop_hands_out_what_is_still_on_the_device(
    engine: LocalEngine, request_for: Callable[..., RolloutRequest], slow: threading.Event
) -> None:
    async def stop_meanwhile() -> Any:
        asked = asyncio.create_task(engine.generate(request_for(1)))
        while not engine.finishing.busy():
            await asyncio.sleep(0.001)
        threading.Timer(0.05, slow.set).start()
        await engine.stop()
        return await asked

    (sample,) = asyncio.run(stop_meanwhile())
    assert sample.media is not None


def test_the_time_of_a_batch_does_not_count_that_of_the_one_before_it(
    engine: LocalEngine, request_for: Callable[..., RolloutRequest]
) -> None:
    sampler = engine.sampler
    assert sampler is not None
    rows = [Row(request_for(1), 0)]
    batch = sampler.launch(rows, version=0)
    assert isinstance(batch, Launched)
    time.sleep(0.2)
    (whole,) = batch.samples()
    (part,) = batch.samples(since=time.perf_counter() - 0.05)
    assert whole.seconds >= 0.2
    assert 0.05 <= part.seconds < whole.seconds
