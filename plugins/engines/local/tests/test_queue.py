"""The queue of engine local: choosing a batch is cheap, a bad row fails alone, a restart begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.api import BadInput, EngineDead, Launch, RolloutRequest, Sample
from drl.testing.contracts.weights import make_bucket
from drl_engine_local.engine import LocalEngine
from drl_engine_local.schedule import Row
from drl_engine_local.waiting import Job, WaitingRows

MakeRequest = Callable[..., RolloutRequest]


def latents(sample: Sample) -> Tensor:
    assert sample.trajectory is not None
    return sample.trajectory.latents["visual"]


def launch_of(engine: LocalEngine) -> Launch:
    assert engine.launch is not None
    return engine.launch


def refuse_bad(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the prompt "bad" one that cannot be encoded."""
    assert engine.sampler is not None
    pipeline: Any = engine.sampler.pipeline
    encode = pipeline.encode_text

    def encoded(texts: list[str]) -> Any:
        if texts[0] == "bad":
            raise BadInput("the prompt is bad")
        return encode(texts)

    monkeypatch.setattr(pipeline, "encode_text", encoded)


def test_the_key_of_a_row_is_made_once_and_the_choice_ends_with_a_full_batch(
    request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Row] = []
    key: Any = Row.key
    get: Callable[[Row], Hashable] = key.fget

    def counted(row: Row) -> Hashable:
        made.append(row)
        return get(row)

    monkeypatch.setattr(Row, "key", property(counted))
    waiting = WaitingRows(3, 0.0, lambda: False)
    jobs = [Job(Row(request_for(seed), 0)) for seed in range(5)]
    waiting.add(jobs)
    for job in jobs[:3]:
        assert len(waiting.batch_with(job)) == 3
    assert len(made) == len(jobs)
    waiting.jobs.append(None)  # type: ignore[arg-type]  # whoever looks at it fails
    assert waiting.batch_with(jobs[0]) == jobs[:3]


def test_a_job_that_failed_or_was_cancelled_is_taken_by_no_batch(request_for: MakeRequest) -> None:
    waiting = WaitingRows(4, 0.0, lambda: False)
    failed, cancelled, good, own = (Job(Row(request_for(seed), 0)) for seed in range(4))
    waiting.add([failed, cancelled, good, own])
    failed.fail(BadInput("the prompt is bad"))
    cancelled.done.cancel()
    assert waiting.batch_with(own) == [own, good]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_bad_row_fails_alone_wherever_it_stands(
    engine: LocalEngine, request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    alone = {seed: asyncio.run(engine.generate(request_for(seed)))[0] for seed in range(4)}
    refuse_bad(engine, monkeypatch)

    async def together() -> list[Any]:
        texts = ["bad" if seed == place else "a sign" for seed in range(4)]
        requests = [request_for(seed, text=text) for seed, text in enumerate(texts)]
        return await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)

    for _ in range(5):  # the event loop may or may not be quick enough to take the bad row away
        made = asyncio.run(together())
        assert isinstance(made.pop(place), BadInput)
        for (sample,) in made:
            assert torch.equal(latents(sample), latents(alone[sample.seed]))
    assert engine.waiting.jobs == []


def test_an_engine_that_starts_again_is_version_0(
    engine: LocalEngine, request_for: MakeRequest
) -> None:
    launch = launch_of(engine)
    (base,) = asyncio.run(engine.generate(request_for(7)))
    assert engine.store is not None
    weight = engine.store.components["transformer"].tensors["proj_out.weight"].detach() * 2

    async def push() -> None:
        await engine.begin_update(5)
        await engine.update_weights(make_bucket({"proj_out.weight": weight}, version=5))
        await engine.end_update(5)

    asyncio.run(push())
    (updated,) = asyncio.run(engine.generate(request_for(7)))
    asyncio.run(engine.stop())
    asyncio.run(engine.start(launch))
    (again,) = asyncio.run(engine.generate(request_for(7)))
    assert (base.version, updated.version, again.version) == (0, 5, 0)
    assert torch.equal(latents(again), latents(base))


def test_a_request_that_waits_for_an_update_leaves_no_rows_when_the_engine_stops(
    engine: LocalEngine, request_for: MakeRequest
) -> None:
    launch = launch_of(engine)

    async def story() -> None:
        await engine.begin_update(1)
        asked = asyncio.create_task(engine.generate(request_for(1, 2, 3)))
        await asyncio.sleep(0.02)
        assert not asked.done()
        await engine.stop()
        with pytest.raises(EngineDead, match="not running"):
            await asked

    asyncio.run(story())
    assert engine.waiting.jobs == []
    asyncio.run(engine.start(launch))
    asyncio.run(engine.generate(request_for(9)))
    assert engine.counts() == {"rows": 4.0, "filler_rows": 3.0}
