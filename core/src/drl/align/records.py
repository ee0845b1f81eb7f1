"""Changes of what the engine recorded: latents, schedule, conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from drl.align.changes import Change, Scene, with_pairs
from drl.mathematics.gaussian import draw
from drl.types import ConditionRecord, Pair, Sample, Streams, Trajectory, successor

if TYPE_CHECKING:
    from torch import Tensor

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes that latents and conditions may have been rounded to on the way."""


def stored_latents(scene: Scene) -> Iterator[Change]:
    """Latents in another precision than the engine computed with."""
    for name, dtype in LOWER.items():
        if any(loses(pair.tensors, dtype) for pair in scene.pairs):
            yield with_pairs(
                scene,
                f"stored latents rounded to {name}",
                f"the engine computes with latents rounded to {name} and hands over others; it must hand "
                "over what it computed with",
                lambda pair, dtype=dtype: replace(pair, tensors=rounded(pair.tensors, dtype)),  # type: ignore[misc]
            )
    if scene.samples and all(pair.debug for pair in scene.pairs):
        yield with_pairs(
            scene,
            "latents from the engine's means and noises",
            f"the stored latents ({precision(scene)}) are not those that the engine computed with: "
            "mean + std x noise of its own tensors are; they were rounded on their way into the samples",
            lambda pair: before_storing(pair, scene.samples),
        )


def precision(scene: Scene) -> str:
    """Say which lower dtype holds all stored latents exactly, if one does."""
    for name, dtype in LOWER.items():
        if not any(loses(pair.tensors, dtype) for pair in scene.pairs):
            return f"all of them {name} numbers"
    return "float32"


def loses(tensors: Streams, dtype: torch.dtype) -> bool:
    """True when rounding to a dtype changes a tensor."""
    changed = rounded(tensors, dtype)
    return any(not torch.equal(changed[name], tensor) for name, tensor in tensors.items())


def rounded(tensors: Streams, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors rounded to a dtype, in their own; what is no floating-point number stays."""
    return {
        name: tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def before_storing(pair: Pair, samples: Mapping[int, Sample]) -> Pair:
    """Return a pair with latents made again from the engine's means and noises, where these are known."""
    trajectory = samples[pair.unit].trajectory
    if trajectory is None or len(trajectory.latents) != 1:
        return pair
    (stream,) = trajectory.latents
    step, device = int(pair.values["step"]), pair.tensors[stream].device
    tensors = {**pair.tensors, successor(stream): made(trajectory, step).to(device)}
    if step > 0:  # the first latents were drawn, not made by a step
        tensors[stream] = made(trajectory, step - 1).to(device)
    return replace(pair, tensors=tensors)


def made(trajectory: Trajectory, step: int) -> Tensor:
    """Return the latents after a step, ``(*L)``, not rounded."""
    debug = trajectory.debug
    mean, noise = debug["prev_sample_means"][step], debug["variance_noises"][step]
    return draw(mean[None], debug["noise_std_devs"][step].reshape(1), noise[None])[0]


def schedules(scene: Scene) -> Iterator[Change]:
    """Another sigma table, or another way to the time that the model is fed."""
    sigmas, timesteps = scene.sigmas, scene.timesteps
    if sigmas is not None and timesteps is not None:
        table, times = sigmas.tolist(), timesteps.tolist()
        steps = len(times)
        if all(int(pair.values.get("step", steps)) < steps for pair in scene.pairs):
            moved = [
                pair
                for pair in scene.pairs
                if times_of(of_table(pair, table, times)) != times_of(pair)
            ]
            if moved:
                yield with_pairs(
                    scene,
                    "the trainer's own sigma table",
                    "the schedule in the samples is not the one that the engine used, which is the trainer's",
                    lambda pair: of_table(pair, table, times),
                )
    family = scene.replay.forward.family

    def derived(pair: Pair) -> Pair:
        time_B = family.model_time(torch.tensor([pair.sigma]), None)
        return replace(pair, timestep=float(time_B[0]))

    timed = [pair for pair in scene.pairs if pair.timestep is not None]
    if timed and any(derived(pair).timestep != pair.timestep for pair in timed):
        yield with_pairs(
            scene,
            "model time from sigma",
            "the engine feeds the model a time that it derives from sigma, not the timestep it records",
            derived,
        )


def times_of(pair: Pair) -> tuple[object, ...]:
    """Return what a pair has of its schedule."""
    return pair.sigma, pair.timestep, dict(pair.values)


def of_table(pair: Pair, sigmas: list[float], timesteps: list[float]) -> Pair:
    """Return a pair at the place that its step has in a schedule."""
    step = int(pair.values["step"])
    values = {"sigma_next": sigmas[step + 1], "sigma_max": sigmas[1]}
    known = {name: value for name, value in values.items() if name in pair.values}
    return replace(
        pair,
        sigma=sigmas[step],
        timestep=None if pair.timestep is None else timesteps[step],
        values={**pair.values, **known},
    )


def conditions(scene: Scene) -> Iterator[Change]:
    """Conditions in another precision than the engine computed with."""
    for name, dtype in LOWER.items():
        records = {
            id(r): r for p in scene.pairs for r in (p.condition, p.negative) if r is not None
        }
        if not any(loses(record.tensors, dtype) for record in records.values()):
            continue
        lower = {
            key: replace(record, tensors=rounded(record.tensors, dtype))
            for key, record in records.items()
        }

        def change(pair: Pair, lower: Mapping[int, ConditionRecord] = lower) -> Pair:
            other = [
                None if one is None else lower.get(id(one), one)
                for one in (pair.condition, pair.negative)
            ]
            return replace(pair, condition=other[0], negative=other[1])

        yield with_pairs(
            scene,
            f"conditions rounded to {name}",
            f"the engine conditions the model on embeddings rounded to {name} and hands over others",
            change,
        )
