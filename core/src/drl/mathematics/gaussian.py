"""Log-density of a Gaussian step, averaged over the elements of a row (Flow-GRPO, arXiv 2505.05470).

Axes: ``B`` rows, ``*L`` latent axes. The mean over elements, not the sum: clip ranges of 1e-4 are
meant for it. Everything is computed in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

LOG_SQRT_2_PI = math.log(math.sqrt(2 * math.pi))


def over_rows(values_B: Tensor, like: Tensor) -> Tensor:
    """Give ``(B,)`` trailing axes of size 1, so that it broadcasts over the rows of ``like``."""
    return values_B.reshape(-1, *[1] * (like.dim() - 1))


def row_mean(values: Tensor) -> Tensor:
    """Return the mean of each row, ``(B, *L)`` to ``(B,)``.

    Row by row, because one reduction over a batch adds up in an order that depends on B; so a row's
    value is the same bits whoever shares its batch.
    """
    means: Tensor = _RowMean.apply(values)  # type: ignore[no-untyped-call]
    return means


class _RowMean(torch.autograd.Function):
    """A mean kernel per row; the gradient, the same number for all elements of a row, takes one for all."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor) -> Tensor:
        ctx.shape = values.shape  # type: ignore[attr-defined]
        return torch.stack([row.mean() for row in values.unbind(0)])

    @staticmethod
    def backward(ctx: FunctionCtx, grad_B: Tensor) -> Tensor:  # type: ignore[override]
        shape: torch.Size = ctx.shape  # type: ignore[attr-defined]
        share_B = grad_B / shape[1:].numel()
        return share_B.reshape(-1, *[1] * (len(shape) - 1)).expand(shape)


def log_prob(value: Tensor, mean: Tensor, std_B: Tensor) -> Tensor:
    """Return ``(B,)``: mean of ``-(x - m)^2 / (2 s^2) - ln s - ln sqrt(2 pi)``.

    ``value`` (a recorded latent, no gradient) and ``mean``: ``(B, *L)``; ``std_B``: ``(B,)``, above 0.
    """
    std = over_rows(std_B.float(), mean)
    squared = (value.detach().float() - mean.float()) ** 2
    # constants inside the mean, as the references have them: the rounding is then theirs
    return row_mean(-squared / (2 * std**2) - std.log() - LOG_SQRT_2_PI)


def log_prob_no_const(value: Tensor, mean: Tensor) -> Tensor:
    """Return ``(B,)``: mean of ``-(x - m)^2``, the form without std and constants that CPS uses."""
    return -row_mean((value.detach().float() - mean.float()) ** 2)


def draw(mean: Tensor, noise_std_B: Tensor, noise: Tensor) -> Tensor:
    """Return ``mean + noise_std * noise`` in float32, ``(B, *L)``; engines and trainers share this order."""
    return mean.float() + over_rows(noise_std_B.float(), mean) * noise.float()
