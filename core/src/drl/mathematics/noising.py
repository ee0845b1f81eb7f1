"""The forward process of flow matching on a batch of pairs: noise by pair, latents between data and noise."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Generator, Tensor

from drl.api import ForwardInputs, PairBatch, StepContext, Streams
from drl.mathematics.gaussian import over_rows, row_mean
from drl.mathematics.transfer import stacked

Level = TypeVar("Level", float, Tensor)


def shifted(level: Level, shift: float) -> Level:
    """Return ``s x / (1 + (s - 1) x)``: noise levels moved up (Stable Diffusion 3, arXiv 2403.03206, 5.3.2)."""
    return shift * level / (1 + (shift - 1) * level)


def logit_normal_level(generator: Generator) -> float:
    """Return ``sigmoid(z)``, z standard normal (Stable Diffusion 3, arXiv 2403.03206, section 3.1)."""
    return float(torch.randn((), generator=generator).double().sigmoid())


def pair_noise(pairs: PairBatch, context: StepContext, purpose: str) -> Streams:
    """Draw standard normal noise on the CPU, pair by pair, whatever device the training runs on.

    A function of run seed, purpose and pair id, so it depends neither on the batch nor on the rank.
    """
    rows: dict[str, list[Tensor]] = {stream: [] for stream in pairs.tensors}
    for pair in pairs.pairs:
        generator = context.generator(purpose, *pair.id)
        for stream, noise in rows.items():
            noise.append(torch.randn(pair.tensors[stream].shape, generator=generator))
    return {stream: stacked(noise, pairs.tensors[stream].device) for stream, noise in rows.items()}


def noised(clean: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
    """Return ``(1 - sigma) x0 + sigma noise``, ``(B, *L)``."""
    sigma = over_rows(sigma_B, clean)
    return (1 - sigma) * clean + sigma * noise


def noised_with_targets(pairs: PairBatch, context: StepContext, purpose: str) -> ForwardInputs:
    """Return the noised clean latents of a batch; ``extras`` holds ``noise - x0``, what flow matching learns."""
    noise = pair_noise(pairs, context, purpose)
    streams, targets = {}, {}
    for stream, clean in pairs.tensors.items():
        streams[stream] = noised(clean, noise[stream], pairs.sigma_B)
        targets[target_of(stream)] = noise[stream] - clean
    return ForwardInputs(streams=streams, extras=targets)


def target_of(stream: str) -> str:
    """Key of a stream's target in ``ForwardInputs.extras``."""
    return f"{stream}.target"


def velocity_error(velocity: Streams, inputs: ForwardInputs) -> Tensor:
    """Return the squared distance of a prediction to its targets, ``(B,)`` float32, streams summed."""
    return squared_distance(velocity, {name: inputs.extras[target_of(name)] for name in velocity})


def squared_distance(one: Streams, other: Streams) -> Tensor:
    """Return ``mean_nb((one - other)^2)``, ``(B,)`` float32, streams summed; ``other`` has no gradient."""
    distances = [
        row_mean((x.float() - other[stream].detach().float()) ** 2) for stream, x in one.items()
    ]
    return torch.stack(distances).sum(0)
