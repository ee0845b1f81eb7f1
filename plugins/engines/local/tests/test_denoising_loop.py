"""The denoising loop never waits for its device: run on a device whose tensors have no content.

Whoever asks a tensor of the meta device for its value, or for a copy on the CPU, gets an error; a copy to
the device in the middle of the loop is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from operator_watch import Watch
from torch import Tensor, nn

from drl.api import (
    Condition,
    Context,
    Family,
    Launch,
    RolloutRequest,
    Sampling,
    WeightSource,
)
from drl_engine_local.result import Path
from drl_engine_local.sampler import Batch, Sampler
from drl_engine_local.schedule import Row, Schedule

ROWS, STEPS = 4, 4
LATENT = (4, 16, 16)
DEVICE = torch.device("meta")


class ImaginedNoise:
    """Noise without content: a generator of a GPU needs a GPU."""

    def initial(self) -> Tensor:
        return torch.empty((ROWS, *LATENT), device=DEVICE)

    def draw(self, stochastic: Sequence[bool]) -> Tensor:
        return torch.empty((ROWS, *LATENT), device=DEVICE)


def sampler_of(launch: Launch, model: nn.Module, family: Family) -> Sampler:
    pipeline = family.pipeline(launch.checkpoint, Context())
    assert pipeline is not None
    return Sampler(
        family=family,
        pipeline=pipeline,
        models={"transformer": model},
        backends=launch.sde_backends,
        count=ROWS,
        device="cpu",
        dtype="bf16",
        batched_guidance=True,
    )


def imagined_batch(sampler: Sampler, requests: Sequence[RolloutRequest]) -> Batch:
    """Return a batch as it is once everything lies on the device."""
    rows = [Row(request, 0) for request in requests]
    sampling = rows[0].request.sampling
    stochastic = tuple(tuple(step in row.stochastic_steps for row in rows) for step in range(STEPS))
    guided = sampling.guided
    mixed = any(any(step) and not all(step) for step in stochastic)
    return Batch(
        rows=tuple(rows),
        sampling=sampling,
        schedule=Schedule(
            sigmas=torch.zeros(STEPS + 1),
            timesteps=torch.zeros(STEPS),
            sigmas_B=tuple(torch.empty(ROWS, device=DEVICE) for _ in range(STEPS + 1)),
            timesteps_B=tuple(torch.empty(ROWS, device=DEVICE) for _ in range(STEPS)),
            times=(1000.0, 750.0, 500.0, 250.0),
        ),
        noise=ImaginedNoise(),  # type: ignore[arg-type]
        conditions=sampler.family.conditions(
            imagined_condition(), imagined_condition() if guided else None, batched=True
        ),
        stochastic=stochastic,
        masks=torch.empty((STEPS, ROWS), dtype=torch.bool, device=DEVICE) if mixed else None,
    )


def imagined_condition() -> Condition:
    text = torch.empty((ROWS, 12, 32), device=DEVICE)
    pooled = torch.empty((ROWS, 32), device=DEVICE)
    return Condition(
        arguments={"encoder_hidden_states": text, "pooled_projections": pooled}, rows=ROWS
    )


def watched(
    launch: Launch, family: Family, requests: Sequence[RolloutRequest]
) -> tuple[Path, Watch]:
    """Run the loop on the imagined device."""
    source = WeightSource(checkpoint=launch.checkpoint, meta=True)
    model = family.build("transformer", source).eval().requires_grad_(False)
    sampler = sampler_of(launch, model, family)
    batch = imagined_batch(sampler, requests)
    with torch.no_grad(), Watch() as watch:
        return sampler.denoise(batch), watch


@pytest.mark.parametrize("kind", ["sde", "cps"])
@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_loop_asks_the_device_nothing(
    tiny_launch: Launch,
    cps_launch: Launch,
    request_for: Callable[..., RolloutRequest],
    sampling: Sampling,
    kind: str,
    guidance: float,
) -> None:
    launch = tiny_launch if kind == "sde" else cps_launch
    settings = replace(sampling, sde_type=kind, guidance_scale=guidance)
    same, other, debug = (
        request_for(1, sampling=settings),
        request_for(2, sampling=settings, sde_steps=(1,), kept_latents=(1, 2)),
        request_for(3, sampling=settings, debug=True),
    )
    path, watch = watched(launch, launch.family, [same, other, debug, same])
    assert (watch.questions, watch.copies) == ([], [])
    kept = [*path.latents.values(), path.last, path.log_probs]
    assert {tensor.device.type for tensor in kept} == {"meta"}
    assert path.log_probs.shape == (STEPS, ROWS)
    assert len(path.steps) == STEPS
    assert watch.operators["aten.mm"] + watch.operators["aten.addmm"] > STEPS


def asks_a_value(velocity: Tensor) -> Tensor:
    return velocity if bool(velocity.isfinite().all()) else velocity * 0


def asks_a_copy(velocity: Tensor) -> Tensor:
    velocity.cpu()
    return velocity


def brings_a_table(velocity: Tensor) -> Tensor:
    return velocity * torch.ones(ROWS, 1, 1, 1).to(velocity.device)


def faulty(launch: Launch, fault: Callable[[Tensor], Tensor]) -> Family:
    kind = type(launch.family)

    class Faulty(kind):  # type: ignore[misc, valid-type]
        def forward(self, *arguments: Any) -> Mapping[str, Tensor]:
            return {"visual": fault(super().forward(*arguments)["visual"])}

    return Faulty(launch.family.options, Context())


@pytest.mark.parametrize("fault", [asks_a_value, asks_a_copy])
def test_a_loop_that_asks_is_caught(
    tiny_launch: Launch,
    request_for: Callable[..., RolloutRequest],
    fault: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta tensor"):
        watched(tiny_launch, faulty(tiny_launch, fault), [request_for(1)] * ROWS)


def test_a_loop_that_brings_something_is_caught(
    tiny_launch: Launch, request_for: Callable[..., RolloutRequest]
) -> None:
    family = faulty(tiny_launch, brings_a_table)
    _, watch = watched(tiny_launch, family, [request_for(1)] * ROWS)
    assert watch.copies == ["aten._to_copy"] * STEPS
