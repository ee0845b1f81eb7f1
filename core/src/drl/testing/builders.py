"""Small, deterministic test data: every tensor is drawn from a generator seeded with the seed given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from drl.types import (
    EMPTY,
    VISUAL,
    ConditionRecord,
    Media,
    Pair,
    Prompt,
    Sample,
    Trajectory,
    successor,
)

if TYPE_CHECKING:
    from torch import Tensor

LATENT = (4, 1, 4, 4)
"""Latent axes of the built samples and pairs: channels, frames, height, width."""


def make_prompt(
    text: str = 'a sign that says "OPEN"', *, row: int = 0, metadata: Mapping[str, Any] = EMPTY
) -> Prompt:
    """Return a prompt of the given row."""
    return Prompt(row=row, text=text, metadata=metadata)


def make_sample(
    text: str = 'a sign that says "OPEN"',
    *,
    pixels: Tensor | None = None,
    index: int = 0,
    group_index: int = 0,
    member: int = 0,
    seed: int = 0,
    steps: int = 0,
    latent: tuple[int, ...] = LATENT,
    reward: float | None = None,
) -> Sample:
    """Return a sample with an image, and with a trajectory when ``steps`` is above 0.

    ``pixels``: ``(3, F, H, W)`` in [0, 1]; seeded noise of 3 × 1 × 16 × 16 when absent. The trajectory
    has ``steps + 1`` random latents, sigmas falling evenly from 1 to 0 and log-probs below 0.
    """
    generator = torch.Generator().manual_seed(seed)
    if pixels is None:
        pixels = torch.rand(3, 1, 16, 16, generator=generator)
    return Sample(
        index=index,
        group_index=group_index,
        member=member,
        prompt=make_prompt(text, row=group_index),
        seed=seed,
        media=Media(pixels=pixels, kind="image" if pixels.shape[1] == 1 else "video"),
        trajectory=_trajectory(steps, latent, generator) if steps else None,
        condition=ConditionRecord(tensors={"text": torch.randn(3, 8, generator=generator)}),
        negative=ConditionRecord(tensors={"text": torch.zeros(3, 8)}),
        reward=reward,
    )


def make_pair(
    *,
    id: tuple[int, ...] = (0, 0),
    unit: int = 0,
    sigma: float = 0.5,
    seed: int = 0,
    latent: tuple[int, ...] = LATENT,
    weight: float = 1.0,
    values: Mapping[str, float] = EMPTY,
) -> Pair:
    """Return a pair with latents and next latents of the visual stream; timestep is 1000 · sigma."""
    generator = torch.Generator().manual_seed(seed)
    return Pair(
        id=id,
        unit=unit,
        sigma=sigma,
        timestep=1000.0 * sigma,
        weight=weight,
        tensors={
            VISUAL: torch.randn(latent, generator=generator),
            successor(VISUAL): torch.randn(latent, generator=generator),
        },
        condition=ConditionRecord(tensors={"text": torch.randn(3, 8, generator=generator)}),
        negative=ConditionRecord(tensors={"text": torch.zeros(3, 8)}),
        values=values,
    )


def _trajectory(steps: int, latent: tuple[int, ...], generator: torch.Generator) -> Trajectory:
    sigmas = torch.linspace(1.0, 0.0, steps + 1)
    return Trajectory(
        latents={VISUAL: torch.randn((steps + 1, *latent), generator=generator)},
        latent_steps=tuple(range(steps + 1)),
        sigmas=sigmas,
        timesteps=1000.0 * sigmas[:-1],
        log_probs=-torch.rand(steps, generator=generator),
        sde_steps=tuple(range(steps)),
    )
