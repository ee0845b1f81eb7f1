"""The ends of a schedule: steps that start at 1 or nearly, and the last one, down to 0."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from drl.api import Context
from drl.mathematics.gaussian import draw
from drl_sde_flow.flow import FlowOde, FlowSde

SECTION = SimpleNamespace(noise_level=0.7, log_prob_no_const=False)


def sde() -> FlowSde:
    return FlowSde(None, Context(section=SECTION))


def shifted(steps: int, shift: float) -> list[float]:
    even = [1 - step / steps for step in range(steps + 1)]
    return [shift * s / (1 + (shift - 1) * s) for s in even]


@pytest.mark.parametrize(("shift", "scale"), [(1, 22.1), (3, 66.4), (5, 110.7)])
def test_tables_that_start_just_below_one_have_a_first_step_of_mostly_noise(
    shift: float, scale: float
) -> None:
    """FlowUniPC starts at about ``1 - 0.001 / shift^2``, which is not close enough to 1."""
    start = torch.tensor([1 - 0.001 / shift**2], dtype=torch.float32)
    found = sde().std_dev_t(start, torch.tensor([0.96]))
    assert float(found) == pytest.approx(scale, rel=0.01)
    # from shift 10 on the start counts as 1
    near = torch.tensor([1 - 0.001 / 10.5**2])
    assert float(sde().std_dev_t(near, torch.tensor([0.96]))) == pytest.approx(
        0.7 * math.sqrt(1 / 0.04), rel=1e-3
    )


def rescored(here: float, after: float, second: float) -> float:
    """Largest difference of a log-prob taken from the noise and one from ``x_next - mean``."""
    x, v, noise = torch.randn(3, 64, 48, generator=torch.Generator().manual_seed(1)).unbind(0)
    here_B, after_B, second_B = (torch.full((64,), value) for value in (here, after, second))
    step = sde().transition(x, v, here_B, after_B, sigma_max_B=second_B)
    found_B = sde().log_prob(draw(step.mean, step.noise_std, noise), step)
    exact_B = (
        -(noise.double() ** 2).mean(1) / 2
        - step.noise_std.double().log()
        - math.log(math.sqrt(2 * math.pi))
    )
    return float((found_B.double() - exact_B).abs().max())


def test_log_probs_lose_digits_only_near_the_end() -> None:
    """Not small against clip ranges of 1e-4 and 1e-5: what cancels in ``x_next - mean`` is lost."""
    table = shifted(10, 3.0)
    middle = rescored(table[4], table[5], table[1])
    last = rescored(table[9], table[10], table[1])
    tiny = rescored(0.001, 0.0, 0.75)
    assert middle < 1e-6
    assert last < 5e-6
    assert last < tiny < 1e-4


def test_the_last_step_is_finite_and_has_the_clean_estimate_in_it() -> None:
    """``dt = -sigma``: the mean is ``(x - sigma v)`` less the drift of the noise that is added."""
    x, v = torch.tensor([[2.0]]), torch.tensor([[-1.0]])
    sigma = 0.25
    step = sde().transition(
        x, v, torch.tensor([sigma]), torch.zeros(1), sigma_max_B=torch.tensor([0.9])
    )
    scale = 0.7 * math.sqrt(sigma / (1 - sigma))
    expected = 2.0 * (1 - scale**2 / 2) + 1.0 * (1 + scale**2 * (1 - sigma) / (2 * sigma)) * sigma
    assert float(step.mean) == pytest.approx(expected, rel=1e-6)
    assert float(step.noise_std) == pytest.approx(scale * math.sqrt(sigma))
    assert math.isfinite(float(sde().log_prob(step.mean, step)))


def test_an_euler_step_by_hand() -> None:
    """0.5 to 0.4: ``2 + (-1)(-0.1)``; the whole way of a straight path is one step."""
    ode = FlowOde(None, Context(section=SECTION))
    step = ode.transition(
        torch.tensor([[2.0]]),
        torch.tensor([[-1.0]]),
        torch.tensor([0.5]),
        torch.tensor([0.4]),
        sigma_max_B=torch.tensor([0.9]),
    )
    assert float(step.mean) == pytest.approx(2.1)
    assert (float(step.noise_std), float(step.std_dev_t)) == (0.0, 0.0)
    data, noise = torch.tensor([[0.3, -2.0]]), torch.tensor([[1.5, 0.5]])
    whole = ode.transition(
        noise, noise - data, torch.ones(1), torch.zeros(1), sigma_max_B=torch.ones(1)
    )
    assert torch.allclose(whole.mean, data, atol=1e-6)


def test_the_gradient_reaches_the_velocity_through_the_mean_alone() -> None:
    """``d log_prob / dv = (x_next - mean) / noise_std^2 * slope * dt / elements``."""
    x, v, after = torch.randn(3, 1, 6, generator=torch.Generator().manual_seed(2)).unbind(0)
    v.requires_grad_()
    recorded = after.clone().requires_grad_()
    here_B, after_B, max_B = torch.tensor([0.5]), torch.tensor([0.4]), torch.tensor([0.9])
    step = sde().transition(x, v, here_B, after_B, sigma_max_B=max_B)
    of_v, of_recorded = torch.autograd.grad(
        sde().log_prob(recorded, step).sum(), (v, recorded), allow_unused=True
    )
    slope = 1 + 0.49 * (1 - 0.5) / (2 * 0.5)
    distance = (after - step.mean.detach()) / step.noise_std**2
    assert torch.allclose(of_v, distance * slope * -0.1 / 6, rtol=1e-4)
    assert of_recorded is None
