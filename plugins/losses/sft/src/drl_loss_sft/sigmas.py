"""Noise levels of supervised training (rl-post-training reference 5.4)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Generator, Tensor

from drl.mathematics.noising import shifted

GRID_POINTS = 1000


@cache
def shifted_grid(shift: float) -> Tensor:
    """Return ``(1000,)`` float64: 1 down to 1/1000 in even steps, then ``s x / (1 + (s - 1) x)``."""
    even = torch.linspace(1.0, 1.0 / GRID_POINTS, GRID_POINTS, dtype=torch.float64)
    return shifted(even, shift)


def draw_from_grid(shift: float, generator: Generator) -> float:
    """Return one point of the grid, all points alike."""
    place = torch.randint(GRID_POINTS, (), generator=generator)
    return float(shifted_grid(shift)[place])
