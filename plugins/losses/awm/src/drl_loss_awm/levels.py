"""Noise levels of advantage weighted matching: stratified, so that few of them cover the range.

As the training script of the paper draws them (scxue/advantage_weighted_matching).
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from drl.mathematics.noising import shifted

LOWEST = 0.01
EDGE = 1e-7


def step_numbers(limit: int, count: int, generator: Generator) -> list[int]:
    """Return ``count`` step numbers below ``limit``, one of each equal stretch, ascending.

    A stretch shorter than a step gives its first one, so numbers repeat when ``count`` exceeds ``limit``.
    """
    bounds = [limit * place // count for place in range(count + 1)]
    draws = torch.rand(count, generator=generator).tolist()
    return [
        low + int(draw * (high - low))
        for low, high, draw in zip(bounds[:-1], bounds[1:], draws, strict=True)
    ]


def logit_normal(count: int, shift: float, generator: Generator) -> Tensor:
    """Return ``(count,)`` sigmas: ``sigmoid(z)``, shifted, one of each of ``count`` equally likely ranges.

    At least 0.01; float64, ascending.
    """
    even = torch.rand(count, generator=generator, dtype=torch.float64)
    quantile = (torch.arange(count) + even) / count
    raw: Tensor = torch.special.ndtri(quantile.clamp(EDGE, 1 - EDGE)).sigmoid()
    return shifted(raw, shift).clamp(min=LOWEST)
