"""Seeds, noise, batches, trajectories and refusals of engine local."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from drl.api import (
    BadInput,
    Condition,
    Context,
    EngineDead,
    EngineError,
    Family,
    Launch,
    RolloutRequest,
    Sample,
    Sampling,
    Trajectory,
    WeightSource,
)
from drl_engine_local.config import LocalOptions
from drl_engine_local.engine import LocalEngine

Ask = Callable[..., list[Sample]]
MakeRequest = Callable[..., RolloutRequest]


def path_of(sample: Sample) -> Trajectory:
    assert sample.trajectory is not None
    return sample.trajectory


def latents_of(sample: Sample) -> Tensor:
    return path_of(sample).latents["visual"]


def picture(sample: Sample) -> Tensor:
    assert sample.media is not None
    return sample.media.pixels


def same(one: Sample, other: Sample) -> bool:
    return (
        torch.equal(latents_of(one), latents_of(other))
        and torch.equal(path_of(one).log_probs, path_of(other).log_probs)
        and torch.equal(picture(one), picture(other))
    )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_sample_draws_its_start_and_then_one_noise_per_stochastic_step(ask: Ask) -> None:
    generator = seeded(7)
    shape = (1, 4, 16, 16)
    start = torch.randn(shape, generator=generator)[0]
    noises = [torch.randn(shape, generator=generator)[0] for _ in range(2)]
    path = path_of(ask(7, sde_steps=(1, 3), debug=True)[0])
    assert torch.equal(path.at(0)["visual"], start)
    drawn = path.debug["variance_noises"]
    assert torch.equal(drawn[1], noises[0])
    assert torch.equal(drawn[3], noises[1])
    assert float(drawn[[0, 2]].abs().max()) == 0.0


def test_debug_tensors_tie_a_step_together(ask: Ask) -> None:
    path = path_of(ask(7, debug=True, sde_steps=(0, 2))[0])
    assert set(path.debug) == {
        "model_outputs",
        "prev_sample_means",
        "noise_std_devs",
        "variance_noises",
    }
    std = path.debug["noise_std_devs"].reshape(-1, 1, 1, 1)
    moved = path.debug["prev_sample_means"] + std * path.debug["variance_noises"]
    assert torch.equal(moved, path.latents["visual"][1:])
    assert [float(value) > 0 for value in path.debug["noise_std_devs"]] == [True, False] * 2


def test_debug_tensors_are_for_those_who_ask(ask: Ask) -> None:
    assert path_of(ask(7)[0]).debug == {}


def test_deterministic_steps_follow_the_euler_rule(ask: Ask) -> None:
    path = path_of(ask(7, sde_steps=(), debug=True)[0])
    dt = (path.sigmas[1:] - path.sigmas[:-1]).reshape(-1, 1, 1, 1)
    x = path.latents["visual"]
    assert torch.equal(x[1:], x[:-1] + path.debug["model_outputs"] * dt)


def test_a_path_seed_equal_to_the_seed_changes_nothing(ask: Ask) -> None:
    assert same(ask(7, path_seeds=(7,))[0], ask(7)[0])


def test_a_group_with_one_start_parts_at_its_first_stochastic_step(ask: Ask) -> None:
    one, two = ask(7, 7, path_seeds=(1, 2), sde_steps=(2,))
    assert torch.equal(latents_of(one)[:3], latents_of(two)[:3])
    assert not torch.equal(latents_of(one)[3], latents_of(two)[3])


def test_the_step_noise_of_a_path_seed_is_that_of_the_sample_with_that_seed(ask: Ask) -> None:
    shared = path_of(ask(7, path_seeds=(9,), debug=True)[0]).debug["variance_noises"]
    own = path_of(ask(9, debug=True)[0]).debug["variance_noises"]
    assert torch.equal(shared, own)


def test_members_of_a_group_are_all_different(ask: Ask) -> None:
    pictures = [picture(sample) for sample in ask(1, 2, 3, 4, 5)]
    pairs = [(a, b) for i, a in enumerate(pictures) for b in pictures[:i]]
    assert min(float((a - b).abs().max()) for a, b in pairs) > 0


@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_a_sample_is_bit_equal_whatever_shares_its_batch(
    engine: LocalEngine, request_for: MakeRequest, ask: Ask, count: int
) -> None:
    alone = ask(50, text="the one")[0]
    crowd = [
        request_for(seed, text=f"prompt {seed}", sde_steps=(seed % 4,), kept_latents=(0,))
        for seed in range(count)
    ]
    mine = request_for(50, text="the one")

    async def together(place: int) -> Sample:
        requests = [*crowd[:place], mine, *crowd[place:]]
        made = await asyncio.gather(*[engine.generate(request) for request in requests])
        return made[place][0]

    for place in {0, count // 2, count}:
        assert same(asyncio.run(together(place)), alone)


def test_requests_of_other_settings_never_share_a_batch(
    engine: LocalEngine, request_for: MakeRequest, sampling: Sampling
) -> None:
    wide = replace(sampling, width=48)
    guided = replace(sampling, guidance_scale=3.0)
    requests = [
        request_for(1),
        request_for(2, sampling=wide),
        request_for(3, sampling=guided),
        request_for(4, evaluation=True),
        request_for(5, sampling=wide),
    ]

    async def together() -> list[list[Sample]]:
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    made = [samples[0] for samples in asyncio.run(together())]
    assert [picture(sample).shape[-1] for sample in made] == [32, 48, 32, 32, 48]
    assert [sample.negative is not None for sample in made] == [False, False, True, False, False]
    assert [sample.trajectory is None for sample in made] == [False, False, False, True, False]


def test_concurrent_requests_fill_the_batches(
    engine: LocalEngine, request_for: MakeRequest, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    forward = family.forward

    def counted(model: object, streams: dict[str, Tensor], time_B: Tensor, c: Condition) -> object:
        rows.append(len(streams["visual"]))
        return forward(model, streams, time_B, c)  # type: ignore[arg-type]

    monkeypatch.setattr(family, "forward", counted)

    async def together() -> None:
        await asyncio.gather(*[engine.generate(request_for(seed)) for seed in range(8)])

    asyncio.run(together())
    assert rows == [4] * (2 * 4)  # two batches of four rows, four steps each


def test_the_event_loop_stays_free_while_a_batch_runs(
    engine: LocalEngine, request_for: MakeRequest, sampling: Sampling
) -> None:
    slow = request_for(1, sampling=replace(sampling, num_steps=40))

    async def watch() -> int:
        task = asyncio.create_task(engine.generate(slow))
        ticks = 0
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        await task
        return ticks

    assert asyncio.run(watch()) > 5


def test_log_probs_are_exactly_those_of_a_trainer_at_the_same_row_count(
    ask: Ask, tiny_launch: Launch, checkpoint: str, sampling: Sampling
) -> None:
    guided = replace(sampling, guidance_scale=1.0)
    samples = ask(1, 2, 3, 4, sampling=guided)
    family, backend = tiny_launch.family, tiny_launch.sde_backends["sde"]
    model = family.build("transformer", WeightSource(checkpoint=checkpoint))
    order = [2, 0, 3, 1]  # another order than the engine's: rows must not care
    rows = [samples[i] for i in order]
    conditions = [family.condition(s.condition) for s in rows if s.condition is not None]
    for step in range(4):
        x = torch.stack([latents_of(s)[step] for s in rows])
        following = torch.stack([latents_of(s)[step + 1] for s in rows])
        sigmas, times = path_of(rows[0]).sigmas, path_of(rows[0]).timesteps
        with torch.no_grad():
            velocity = family.forward(
                model, {"visual": x}, times[step].expand(4), family.collate(conditions)
            )["visual"]
        transition = backend.transition(
            x,
            velocity,
            sigmas[step].expand(4),
            sigmas[step + 1].expand(4),
            sigma_max_B=sigmas[1].expand(4),
        )
        ours = torch.stack([path_of(s).log_probs[step] for s in rows])
        assert torch.equal(backend.log_prob(following, transition), ours)


def test_latents_can_go_through_a_training_forward(ask: Ask) -> None:
    layer = torch.nn.Conv2d(4, 1, 1)
    layer(latents_of(ask(7)[0])[:1]).sum().backward()
    assert layer.weight.grad is not None


def test_evaluation_ignores_noise_settings(ask: Ask, sampling: Sampling) -> None:
    other = replace(sampling, sde_type="cps", noise_level=0.1)
    (evaluated,) = ask(7, sampling=other, evaluation=True)
    assert torch.equal(picture(evaluated), picture(ask(7, sde_steps=())[0]))
    assert "noise_level" not in evaluated.echo


def test_an_empty_negative_prompt_is_not_the_default_one(ask: Ask, sampling: Sampling) -> None:
    guided = replace(sampling, guidance_scale=3.0)
    default, space, word = (
        ask(7, sampling=replace(guided, negative_prompt=text))[0] for text in (None, " ", "blurry")
    )
    assert same(default, space)
    assert not same(default, word)


def test_guidance_off_ignores_the_negative_prompt(ask: Ask, sampling: Sampling) -> None:
    plain = replace(sampling, guidance_scale=1.0)
    assert same(ask(7, sampling=replace(plain, negative_prompt="x"))[0], ask(7, sampling=plain)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sde_steps": (4,)}, r"sde_steps has \[4\]; allowed are 0 to 3"),
        ({"sde_steps": (-1,)}, r"sde_steps has \[-1\]"),
        ({"kept_latents": (5,)}, r"kept_latents has \[5\]; allowed are 0 to 4"),
        ({"path_seeds": (1, 2)}, "one seed per member"),
        ({"members": (0, 1)}, "one seed per member"),
    ],
)
def test_a_request_that_cannot_be_made_is_refused(
    engine: LocalEngine, request_for: MakeRequest, changes: dict[str, object], message: str
) -> None:
    wrong = replace(request_for(7), **changes)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=message):
        asyncio.run(engine.generate(wrong))


def test_two_samples_with_one_seed_are_refused(ask: Ask) -> None:
    with pytest.raises(BadInput, match="would be the same picture"):
        ask(7, 8, 7)


def test_an_sde_type_that_was_not_launched_is_refused(ask: Ask, sampling: Sampling) -> None:
    with pytest.raises(EngineError, match=r"without the SDE backend cpss; it has ode, sde"):
        ask(7, sampling=replace(sampling, sde_type="cpss"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_level": 0.5}, r"sde\.noise_level: asked 0\.5, held 0\.7"),
        ({"log_prob_no_const": True}, r"sde\.log_prob_no_const: asked True, held False"),
    ],
)
def test_a_setting_that_the_backend_would_drop_is_refused(
    ask: Ask, sampling: Sampling, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        ask(7, sampling=replace(sampling, **changes))  # type: ignore[arg-type]


def test_a_bad_request_fails_alone(
    engine: LocalEngine, request_for: MakeRequest, sampling: Sampling, ask: Ask
) -> None:
    good, bad = request_for(1), request_for(2, sampling=replace(sampling, height=33))

    async def together() -> list[object]:
        requests = (good, bad, request_for(3))
        return await asyncio.gather(
            *[engine.generate(request) for request in requests], return_exceptions=True
        )

    made, failed, third = asyncio.run(together())
    assert isinstance(failed, BadInput)
    assert isinstance(made, list)
    assert isinstance(third, list)
    assert same(made[0], ask(1)[0])
    assert engine.waiting.jobs == []


def test_a_cancelled_request_leaves_nothing_behind(
    engine: LocalEngine, request_for: MakeRequest, sampling: Sampling, ask: Ask
) -> None:
    long = request_for(*range(12), sampling=replace(sampling, num_steps=30))

    async def give_up() -> None:
        task = asyncio.create_task(engine.generate(long))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert engine.waiting.jobs == []
    assert len(ask(7)) == 1


def test_generating_before_start_and_after_stop_is_refused(
    tiny_launch: Launch, request_for: MakeRequest
) -> None:
    engine = LocalEngine(LocalOptions.model_validate({}), Context())
    with pytest.raises(EngineDead, match="not running"):
        asyncio.run(engine.generate(request_for(7)))
    asyncio.run(engine.start(tiny_launch))
    with pytest.raises(EngineError, match="started already"):
        asyncio.run(engine.start(tiny_launch))
    asyncio.run(engine.stop())
    with pytest.raises(EngineDead, match="not running"):
        asyncio.run(engine.generate(request_for(7)))


def test_a_model_with_two_streams_is_refused(tiny_launch: Launch) -> None:
    engine = LocalEngine(LocalOptions.model_validate({}), Context())
    two = SimpleNamespace(streams=("visual", "audio"))
    with pytest.raises(BadInput, match="visual, audio"):
        asyncio.run(engine.start(replace(tiny_launch, family=two)))  # type: ignore[arg-type]


def test_a_batch_that_is_not_full_waits_for_late_requests_only_briefly(
    tiny_launch: Launch, request_for: MakeRequest
) -> None:
    engine = LocalEngine(LocalOptions.model_validate({"rows": 4, "wait_ms": 0}), Context())
    asyncio.run(engine.start(tiny_launch))
    start = time.monotonic()
    asyncio.run(engine.generate(request_for(7)))
    assert time.monotonic() - start < 5
    asyncio.run(engine.stop())


@pytest.mark.parametrize(
    ("rows", "alike"), [(1, True), (3, True), (4, True), (6, False), (8, True), (10, False)]
)
def test_an_engine_says_whether_rows_are_alike(rows: int, alike: bool) -> None:
    engine = LocalEngine(LocalOptions.model_validate({"rows": rows}), Context())
    assert engine.capabilities().batch_invariant is alike


def test_rows_of_one_block_are_alike_with_two_threads() -> None:
    weight = torch.randn(32, 96, generator=seeded(0))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows in (1, 2, 3, 4, 8, 12, 16):
            product = torch.nn.functional.linear(torch.ones(rows, 96), weight)
            assert torch.equal(product, product[:1].expand(rows, 32).contiguous())
    finally:
        torch.set_num_threads(before)
