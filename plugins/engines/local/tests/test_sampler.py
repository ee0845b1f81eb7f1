"""What the sampler prepares, keeps and counts: guidance in one forward, shared conditions, filler, graphs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from operator_watch import Watch
from torch import Tensor, nn

from drl.api import (
    BadInput,
    Condition,
    Context,
    Family,
    Launch,
    Media,
    RolloutRequest,
    Sample,
    Sampling,
    Streams,
)
from drl_engine_local.compiling import compile_models
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine
from drl_engine_local.noise import BatchNoise, RowNoise
from drl_engine_local.sampler import SCHEDULES, Sampler
from drl_engine_local.schedule import Row
from drl_engine_local.transfer import Download
from drl_family_sd3.pipeline import Sd3Pipeline

MakeRequest = Callable[..., RolloutRequest]
VIEWS = {"expand", "view", "select", "unbind", "slice", "unsqueeze", "empty", "detach"}
KERNELS_A_STEP = {"sde": 51, "cps": 22}
"""Most kernels of a step beside the forward, its noise and row means, which take one a row each."""


def sampler_of(engine: LocalEngine, **changes: Any) -> Sampler:
    assert engine.sampler is not None
    return replace(engine.sampler, **changes)


def kept(sample: Sample) -> Tensor:
    assert sample.trajectory is not None
    return sample.trajectory.latents["visual"]


def rows_of(*requests: RolloutRequest) -> list[Row]:
    return [Row(request, place) for request in requests for place in range(len(request.seeds))]


class Counting:
    """A family that notes the rows of each forward."""

    def __init__(self, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        forward = family.forward

        def counted(model: nn.Module, streams: Streams, time_B: Tensor, c: Condition) -> Streams:
            assert len(time_B) == c.rows == len(streams["visual"])
            self.rows.append(c.rows)
            return forward(model, streams, time_B, c)

        monkeypatch.setattr(family, "forward", counted)


@pytest.mark.parametrize(("batched", "forwards"), [(True, [8] * 4), (False, [4] * 8)])
def test_guidance_takes_one_forward_of_twice_the_rows_or_two(
    engine: LocalEngine,
    request_for: MakeRequest,
    sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
    batched: bool,
    forwards: list[int],
) -> None:
    guided = replace(sampling, guidance_scale=4.5, negative_prompt="blurred")
    request = request_for(1, 2, 3, sampling=guided)
    (plain, *_) = sampler_of(engine).make(rows_of(request), version=0)
    sampler = sampler_of(engine, batched_guidance=batched)
    counting = Counting(sampler.family, monkeypatch)
    (made, *_) = sampler.make(rows_of(request), version=0)
    assert counting.rows == forwards
    assert torch.allclose(kept(made), kept(plain), atol=1e-5)


def test_the_engine_takes_batched_guidance_from_its_launch(
    tiny_launch: Launch,
    request_for: MakeRequest,
    sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = LocalEngine(LocalOptions.model_validate({"rows": 2, "wait_ms": 0}), Context())
    asyncio.run(engine.start(replace(tiny_launch, batched_guidance=True)))
    counting = Counting(tiny_launch.family, monkeypatch)
    for scale, rows in ((4.5, 4), (1.0, 2)):
        counting.rows.clear()
        asyncio.run(
            engine.generate(request_for(1, sampling=replace(sampling, guidance_scale=scale)))
        )
        assert counting.rows == [rows] * 4
    asyncio.run(engine.stop())


def test_conditions_are_joined_once_a_batch_and_shared_records_moved_once(
    engine: LocalEngine,
    request_for: MakeRequest,
    sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = sampler_of(engine, batched_guidance=True)
    calls: list[int] = []
    collate = sampler.family.collate

    def counted(conditions: Sequence[Condition], pad_to: int | None = None) -> Condition:
        calls.append(
            len({id(condition.arguments["pooled_projections"]) for condition in conditions})
        )
        return collate(conditions, pad_to)

    monkeypatch.setattr(sampler.family, "collate", counted)
    guided = replace(sampling, guidance_scale=4.5)
    one, other = (
        request_for(seed, seed + 1, text=f"sign {seed}", sampling=guided) for seed in (1, 5)
    )
    rows = rows_of(one, other)
    records = [sampler._records(row) for row in rows]
    batch = sampler.batch(rows, records)
    # positive, negative, both; rows of a record share the record, as do all rows their negative one
    assert len(calls) == 3
    assert len({id(positive) for positive, _ in records}) == 2
    assert len({id(negative) for _, negative in records}) == 1
    assert batch.conditions.joint is not None
    assert batch.conditions.joint.rows == 8
    sampler.denoise(batch)
    assert len(calls) == 3


def test_only_what_is_asked_for_outlives_the_loop(
    engine: LocalEngine, request_for: MakeRequest
) -> None:
    sampler = sampler_of(engine)

    def path(*requests: RolloutRequest) -> Any:
        rows = rows_of(*requests)
        return sampler.denoise(sampler.batch(rows, [sampler._records(row) for row in rows]))

    some = path(request_for(1, kept_latents=(1, 2)), request_for(2, kept_latents=(2, 4)))
    assert (sorted(some.latents), some.steps) == ([1, 2, 4], ())
    evaluated = path(request_for(1, evaluation=True), request_for(2, evaluation=True))
    assert (dict(evaluated.latents), evaluated.steps) == ({}, ())
    assert sorted(path(request_for(1)).latents) == [0, 1, 2, 3, 4]
    assert len(path(request_for(1, debug=True), request_for(2)).steps) == 4


def test_a_schedule_is_read_from_the_pipeline_once(
    engine: LocalEngine,
    request_for: MakeRequest,
    sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler = sampler_of(engine, schedules={})
    read = []
    sigmas = sampler.pipeline.sigmas
    monkeypatch.setattr(sampler.pipeline, "sigmas", lambda s: read.append(s) or sigmas(s))
    for seed in range(3):
        negative = replace(sampling, negative_prompt=f"not {seed}")
        sampler.make(rows_of(request_for(seed, sampling=negative)), version=0)
    assert len(read) == 1
    for scale in range(SCHEDULES):
        sampler._schedule(replace(sampling, guidance_scale=2.0 + scale))
    assert len(sampler.schedules) <= SCHEDULES


def test_rows_and_filler_are_counted(tiny_launch: Launch, request_for: MakeRequest) -> None:
    engine = LocalEngine(LocalOptions.model_validate({"rows": 4, "wait_ms": 0}), Context())
    assert engine.counts() == {}
    asyncio.run(engine.start(tiny_launch))
    assert engine.counts() == {"rows": 0.0, "filler_rows": 0.0}
    asyncio.run(engine.generate(request_for(*range(5))))  # a batch of 4, and one of 1
    assert engine.counts() == {"rows": 8.0, "filler_rows": 3.0}
    asyncio.run(engine.generate(request_for(1, 2)))
    assert engine.counts() == {"rows": 12.0, "filler_rows": 5.0}
    asyncio.run(engine.stop())


@pytest.mark.parametrize("kind", ["sde", "cps"])
@pytest.mark.parametrize("count", [4, 8])
def test_a_step_takes_few_kernels_beside_its_forward(
    tiny_launch: Launch,
    cps_launch: Launch,
    engine: LocalEngine,
    request_for: MakeRequest,
    sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    count: int,
) -> None:
    launch = tiny_launch if kind == "sde" else cps_launch
    sampler = sampler_of(engine, backends=launch.sde_backends, count=count)
    monkeypatch.setattr(
        sampler.family, "forward", lambda model, streams, time_B, condition: dict(streams)
    )
    rows = rows_of(request_for(*range(count), sampling=replace(sampling, sde_type=kind)))
    batch = sampler.batch(rows, [sampler._records(row) for row in rows])
    with torch.no_grad(), Watch() as watch:
        sampler.denoise(batch)
    operators = {name.removeprefix("aten."): n for name, n in watch.operators.items()}
    kernels = sum(n for name, n in operators.items() if name not in VIEWS)
    assert kernels / 4 - 2 * count <= KERNELS_A_STEP[kind]


@pytest.fixture
def noise(tiny_launch: Launch, sampling: Sampling) -> Callable[..., RowNoise]:
    pipeline = tiny_launch.family.pipeline(tiny_launch.checkpoint, Context())
    assert pipeline is not None

    def made(seed: int, path_seed: int | None = None) -> RowNoise:
        return RowNoise(
            pipeline, sampling, seed=seed, path_seed=path_seed, stream="visual", device="cpu"
        )

    return made


def test_the_second_generator_only_replaces_step_noise(noise: Callable[..., RowNoise]) -> None:
    both, plain = noise(3, path_seed=4), noise(4)
    assert torch.equal(both.initial, noise(3).initial)
    one, other = torch.zeros(2, 4, 16, 16)
    both.draw(one)
    plain.draw(other)
    assert torch.equal(one, other)
    assert 0.9 < float(one.std()) < 1.1


@pytest.mark.parametrize("count", range(1, 17))
def test_a_row_draws_the_same_noise_whoever_shares_its_batch(
    noise: Callable[..., RowNoise], count: int
) -> None:
    generator = torch.Generator().manual_seed(50)
    shape = (1, 4, 16, 16)
    start, first, second = (torch.randn(shape, generator=generator)[0] for _ in range(3))
    place = count // 2
    rows = [noise(50 if number == place else number) for number in range(count)]
    batch = BatchNoise(rows, 16, torch.device("cpu"))
    initial = batch.initial()
    assert torch.equal(initial[place], start)
    assert torch.equal(batch.draw([True] * 16)[place], first)
    still = batch.draw([number != place for number in range(16)])
    assert float(still[place].abs().max()) == 0.0
    drawn = batch.draw([True] * 16)
    assert torch.equal(drawn[place], second)  # the step in between drew nothing for it
    for filler in range(count, 16):
        assert torch.equal(initial[filler], initial[count - 1])
        assert torch.equal(drawn[filler], drawn[count - 1])


def test_what_is_on_the_cpu_already_is_handed_through() -> None:
    pixels = torch.rand(3, 1, 4, 4)
    download = Download({"0": pixels})
    assert download.done
    assert download.wait()["0"] is pixels


def test_samples_keep_what_their_media_say_beside_pixels(
    engine: LocalEngine, request_for: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(engine)
    clip = Media(pixels=torch.rand(3, 5, 4, 4), kind="video", fps=8.0)
    monkeypatch.setattr(sampler.pipeline, "decode", lambda streams: [clip])
    (sample,) = sampler.make(rows_of(request_for(1)), version=3)
    assert sample.media is not None
    assert (sample.media.kind, sample.media.fps, sample.version) == ("video", 8.0, 3)
    assert sample.echo["num_frames"] == 5


def test_the_prompts_that_will_come_are_told_ahead_with_the_engines_own_negative_one(
    tiny_launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Sd3Pipeline, "expect", lambda self, prompts: told.extend(prompts))
    engine = LocalEngine(LocalOptions.model_validate({}), Context())
    asyncio.run(engine.start(replace(tiny_launch, prompts=("a sign", "a word"))))
    assert told == ["a sign", "a word", " "]
    asyncio.run(engine.stop())


def test_cuda_graphs_on_a_cpu_are_refused_before_anything_is_loaded(
    tiny_launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LocalEngine(LocalOptions.model_validate({"cuda_graphs": True}), Context())
    monkeypatch.setattr(
        tiny_launch.family, "build", lambda *_: pytest.fail("weights were loaded first")
    )
    with pytest.raises(BadInput, match=r"rollout\.local\.cuda_graphs is true, .* runs on cpu"):
        asyncio.run(engine.start(tiny_launch))
    asyncio.run(engine.stop())


def compiled_samples(
    engine: LocalEngine, request_for: MakeRequest, sampling: Sampling
) -> Mapping[str, Sample]:
    sampler = sampler_of(engine)
    wide = replace(sampling, width=48, num_steps=2)
    requests = {
        "training": request_for(7),
        "again": request_for(7),
        "guided": request_for(7, sampling=replace(sampling, guidance_scale=4.5)),
        "evaluation": request_for(7, sampling=wide, evaluation=True),
    }
    return {
        name: sampler.make(rows_of(request), version=0)[0] for name, request in requests.items()
    }


def test_compiled_blocks_make_the_same_samples_and_no_needless_graphs(
    engine: LocalEngine, tiny_launch: Launch, request_for: MakeRequest, sampling: Sampling
) -> None:
    sampler = sampler_of(engine)
    plain = compiled_samples(engine, request_for, sampling)
    log = compile_models(tiny_launch, sampler.models, backend="aot_eager")
    made = compiled_samples(engine, request_for, sampling)
    first = log.graphs
    compiled_samples(engine, request_for, sampling)
    for name, sample in made.items():
        assert sample.media is not None
        other = plain[name].media
        assert other is not None
        assert torch.allclose(sample.media.pixels, other.pixels, atol=1e-5), name
    # one per kind of block and size of picture; the second time everything is there
    assert 0 < first <= 2 * len(list(sampler.models["transformer"].transformer_blocks))  # type: ignore[arg-type]
    assert (log.graphs, log.unexpected) == (first, 0)
    torch._dynamo.reset()


def test_the_option_compiles_the_blocks_that_the_family_names(tiny_launch: Launch) -> None:
    engine = LocalEngine(LocalOptions.model_validate({"compile": True}), Context())
    asyncio.run(engine.start(tiny_launch))
    assert engine.sampler is not None
    compiled = {
        type(module).__name__
        for module in engine.sampler.models["transformer"].modules()
        if module._compiled_call_impl is not None
    }
    assert compiled == {"JointTransformerBlock"}
    counts = engine.counts()
    assert (counts["compiled_graphs"], counts["recompilations"]) == (0.0, 0.0)
    asyncio.run(engine.stop())
