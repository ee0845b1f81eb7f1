"""Noise levels of a preference."""

from __future__ import annotations

import torch
from torch import Generator

from drl.mathematics.noising import logit_normal_level, shifted


def draw_sigma(kind: str, shift: float, generator: Generator) -> float:
    """Return one level in (0, 1]: uniform or ``sigmoid(z)`` with z standard normal, then shifted."""
    if kind == "logit_normal":
        raw = logit_normal_level(generator)
    else:
        raw = 1.0 - float(torch.rand((), generator=generator, dtype=torch.float64))
    return shifted(raw, shift)
