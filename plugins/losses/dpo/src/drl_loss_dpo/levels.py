"""Noise levels of a preference."""

from __future__ import annotations

import torch
from torch import Generator


def draw_sigma(kind: str, shift: float, generator: Generator) -> float:
    """Return one level in (0, 1]: uniform or ``sigmoid(z)`` with z standard normal, then shifted.

    The shift ``s u / (1 + (s - 1) u)`` is that of Stable Diffusion 3 (arXiv 2403.03206, section 5.3.2).
    """
    if kind == "logit_normal":
        raw = float(torch.randn((), generator=generator).double().sigmoid())
    else:
        raw = 1.0 - float(torch.rand((), generator=generator, dtype=torch.float64))
    return shift * raw / (1 + (shift - 1) * raw)
