"""The log-probs of a sample once more, from nothing but its record, as a trainer computes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drl.interfaces.engine import Launch
from drl.types import Guidance, Sample


@torch.no_grad()
def rescored(sample: Sample, launch: Launch, model: nn.Module) -> Tensor:
    """Score the recorded steps as a trainer does, one row at a time; ``(S,)`` on the CPU."""
    path, family = sample.trajectory, launch.family
    assert path is not None
    (stream,) = path.latents
    backend = launch.sde_backends[str(sample.echo.get("sde_type", "sde"))]
    assert sample.condition is not None
    scale = Guidance(scale=float(sample.echo.get("guidance_scale", 1.0)))
    values, device = [], path.latents[stream].device
    sigmas, timesteps = path.sigmas.to(device), path.timesteps.to(device)
    for step in range(len(timesteps)):
        latents = {stream: path.at(step)[stream][None]}
        sigma_B, next_B = sigmas[step : step + 1], sigmas[step + 1 : step + 2]
        time_B = family.model_time(sigma_B, timesteps[step : step + 1])
        velocity = family.forward(model, latents, time_B, family.condition(sample.condition))
        if sample.negative is not None:
            negative = family.forward(model, latents, time_B, family.condition(sample.negative))
            velocity = family.guide(velocity, negative, scale)
        transition = backend.transition(
            latents[stream], velocity[stream], sigma_B, next_B, sigma_max_B=sigmas[1:2]
        )
        following = path.at(step + 1)[stream][None]
        values.append(backend.log_prob(following, transition)[0])
    return torch.stack(values).cpu()
