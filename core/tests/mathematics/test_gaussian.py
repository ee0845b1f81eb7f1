"""Log-densities against torch's Gaussian and numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from drl.mathematics.gaussian import draw, log_prob, log_prob_no_const, over_rows, row_mean


def test_log_prob_of_one_element_by_hand() -> None:
    value, mean, std = torch.tensor([[3.0]]), torch.tensor([[1.0]]), torch.tensor([2.0])
    by_hand = -0.5 - math.log(2.0) - 0.5 * math.log(2 * math.pi)
    assert float(log_prob(value, mean, std)) == pytest.approx(by_hand, abs=1e-6)
    assert float(log_prob_no_const(value, mean)) == -4.0


@pytest.mark.parametrize("shape", [(3, 7), (3, 4, 5, 6), (3, 4, 2, 5, 6)])
def test_log_prob_is_the_mean_of_torchs_gaussian(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    value, mean = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    std = torch.tensor([0.006, 0.5, 3.0])
    variance = over_rows(std.double() ** 2, mean).expand(shape)
    negative = torch.nn.functional.gaussian_nll_loss(
        mean.double(), value.double(), variance, full=True, reduction="none"
    )
    expected = -negative.flatten(1).mean(1)
    assert torch.allclose(log_prob(value, mean, std).double(), expected, rtol=1e-6)


def test_the_density_integrates_to_one() -> None:
    x = torch.linspace(-6, 8, 4001)[:, None]
    density = log_prob(x, torch.full_like(x, 1.0), torch.full((4001,), 0.7)).exp()
    assert float(torch.trapezoid(density, x[:, 0])) == pytest.approx(1.0, abs=1e-4)


def test_the_recorded_value_gets_no_gradient() -> None:
    value, mean = (torch.randn(2, 3).requires_grad_() for _ in range(2))
    total = (log_prob(value, mean, torch.ones(2)) + log_prob_no_const(value, mean)).sum()
    slopes = torch.autograd.grad(total, (value, mean), allow_unused=True)
    assert slopes[0] is None
    assert torch.allclose(slopes[1], (value - mean).detach() * (1 / 3 + 2 / 3))


def test_half_precision_is_widened_first() -> None:
    value = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    mean = torch.full((1, 4096), 1.0078125, dtype=torch.bfloat16)
    result = log_prob_no_const(value, mean)
    assert result.dtype == torch.float32
    assert float(result) == -(0.0078125**2)


@pytest.mark.parametrize("shape", [(33,), (16, 8, 8), (3, 1, 7, 5), (16, 64, 64)])
def test_the_mean_of_a_row_has_the_same_bits_in_any_batch(shape: tuple[int, ...]) -> None:
    values = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))
    together = row_mean(values)
    assert all(torch.equal(row_mean(values[i : i + 1])[0], together[i]) for i in range(7))


def test_row_mean_passes_the_gradient_evenly() -> None:
    values = torch.zeros(2, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(row_mean(values).sum(), values)
    assert slope.tolist() == [[0.25] * 4] * 2


@pytest.mark.parametrize("shape", [(1, 9), (5, 16, 6, 2), (16, 4, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_row_mean_has_the_bits_of_a_mean_per_row_forwards_and_backwards(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator).to(dtype)
    slope_B = torch.randn(shape[0], generator=generator).to(dtype)
    one, other = (values.clone().requires_grad_() for _ in range(2))
    mine = row_mean(one**2)
    theirs = torch.stack([row.mean() for row in (other**2).unbind(0)])
    assert torch.equal(mine, theirs)
    mine.backward(slope_B)
    theirs.backward(slope_B)
    assert one.grad is not None
    assert other.grad is not None
    assert torch.equal(one.grad, other.grad)
    assert one.grad.dtype == dtype


def test_row_mean_agrees_with_finite_differences_and_needs_no_gradient() -> None:
    values = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: row_mean(x**3), (values,))
    with torch.no_grad():
        assert not row_mean(values).requires_grad
    assert not row_mean(values.detach()).requires_grad


def test_a_draw_is_mean_plus_std_times_noise() -> None:
    mean, noise = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, -1.0], [0.5, 0.0]])
    drawn = draw(mean, torch.tensor([2.0, 4.0]), noise)
    assert drawn.tolist() == [[3.0, 0.0], [5.0, 4.0]]


def test_a_low_precision_draw_is_float32() -> None:
    mean, noise = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(1, 2)
    assert draw(mean, torch.tensor([0.001]), noise).tolist() == [[pytest.approx(1.001)] * 2]
