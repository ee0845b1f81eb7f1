"""What the matching error has to do with the likelihood, on a Gaussian where both are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from drl_loss_awm.loss import squared_distance

POINTS, WEIGHTS = np.polynomial.legendre.leggauss(400)
LEVELS = torch.tensor((POINTS + 1) / 2)
SHARES = torch.tensor(WEIGHTS / 2)


def velocity(x: Tensor, s: Tensor, mean: float, std: float) -> Tensor:
    """``E[noise - x0 | x]`` of data N(mean, std^2) at level s."""
    variance = (1 - s) ** 2 * std**2 + s**2
    slope = (s - (1 - s) * std**2) / variance
    return -mean + slope * (x - (1 - s) * mean)


def mismatch(shift: float, std: float) -> Tensor:
    """Error of the exact velocity of N(shift, std^2) on data N(0, std^2), above the least possible."""
    x = torch.zeros(1, dtype=torch.float64)
    moved, right = (velocity(x, LEVELS, mean, std) for mean in (shift, 0.0))
    streams = ({"visual": v[:, None]} for v in (moved, right))
    return squared_distance(*streams)


@pytest.mark.parametrize("std", [0.5, 1.0, 2.0])
def test_weighed_by_the_bound_the_error_is_the_divergence(std: float) -> None:
    """``int (1 - s) / s (v - v*)^2 ds = KL = d^2 / (2 std^2)``, whatever x is: v is linear in it."""
    shift = 0.3
    bound = (SHARES * (1 - LEVELS) / LEVELS * mismatch(shift, std)).sum()
    assert float(bound) == pytest.approx(shift**2 / (2 * std**2), rel=1e-5)


def test_even_weights_pull_the_same_way_at_every_level() -> None:
    """The error grows with the distance of the means at each level, so no level works against another."""
    near, far = mismatch(0.1, 0.7), mismatch(0.2, 0.7)
    assert bool((far > near).all())
    assert torch.allclose(far / near, torch.full_like(far, 4.0), rtol=1e-4)


@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_the_sign_of_the_advantage_turns_the_gradient(advantage: float) -> None:
    """By hand for one sample: the model N(theta, 1) moves towards what was good, away from the rest."""
    theta = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    x0, noise = 0.8, torch.tensor([-0.4, 0.1, 1.2], dtype=torch.float64)
    s = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    x = (1 - s) * x0 + s * noise
    variance = (1 - s) ** 2 + s**2
    slope = (s - (1 - s)) / variance
    predicted = -theta + slope * (x - (1 - s) * theta)
    error = squared_distance({"visual": predicted[:, None]}, {"visual": (noise - x0)[:, None]})
    (gradient,) = torch.autograd.grad(advantage * error.mean(), theta)
    residual = slope * x - (noise - x0)
    expected = advantage * (2 * residual * (-1 - slope * (1 - s))).mean()
    assert float(gradient) == pytest.approx(float(expected), rel=1e-5)
