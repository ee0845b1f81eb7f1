"""``SdeBackendContract``: what every denoising step keeps, whatever its noise is."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.catalog import Catalog
from drl.errors import BadInput
from drl.interfaces.steps import SdeBackend
from drl.mathematics.gaussian import draw
from drl.testing.contracts.base import ContractBase
from drl.types import Context, Transition

IMAGE, VIDEO = (4, 3, 5), (4, 2, 3, 5)
SIGMA_MAX = 0.96
DRAWS = 100_000
# first and last steps of usual tables, with the table's second entry
EDGE_STEPS = [
    (1.0, 0.96, 0.96),
    (0.999993, 0.990818, 0.990818),
    (0.0089, 0.0, 0.96),
    (0.001, 0.0, 0.667),
    (1.0, 0.0, 0.0),
]


class SdeBackendContract(ContractBase):
    """A step is a Gaussian around a mean that follows the velocity, row by row, in float32.

    ``section`` holds ``noise_level`` and ``log_prob_no_const`` of the recipe's ``[sde]``; override it
    where another form is asked for. Capability ``density``: False for deterministic steps.
    """

    @pytest.fixture
    def section(self) -> Any:
        """Noise level 0.7 and the full log-probability."""
        return SimpleNamespace(type=self.component[1], noise_level=0.7, log_prob_no_const=False)

    @pytest.fixture
    def near_silent(
        self, catalog: Catalog, options: Any, context: Context, section: Any
    ) -> SdeBackend:
        """The same backend with next to no noise."""
        quiet = SimpleNamespace(**{**vars(section), "noise_level": 1e-5})
        made = catalog.create(*self.component, options, Context(section=quiet))
        assert isinstance(made, SdeBackend)
        return made

    def test_density_is_declared_as_it_is(self, catalog: Catalog, instance: SdeBackend) -> None:
        entry = catalog.find(*self.component)
        assert entry.component.facts["has_density"] is instance.has_density
        assert instance.has_density is self.capabilities.get("density", True)

    @pytest.mark.parametrize("shape", [IMAGE, VIDEO], ids=["image", "video"])
    def test_shapes(self, instance: SdeBackend, shape: tuple[int, ...]) -> None:
        step = transition_of(instance, *inputs(3, shape))
        assert step.mean.shape == (3, *shape)
        assert step.noise_std.shape == step.std_dev_t.shape == (3,)
        assert instance.log_prob(torch.zeros(3, *shape), step).shape == (3,)

    def test_low_precision_inputs_give_float32(self, instance: SdeBackend) -> None:
        x, v, sigma_B, next_B = inputs(2, IMAGE)
        step = transition_of(instance, x.bfloat16(), v.bfloat16(), sigma_B, next_B)
        wide = transition_of(instance, x.bfloat16().float(), v.bfloat16().float(), sigma_B, next_B)
        density = instance.log_prob(x.bfloat16(), step)
        tensors = (step.mean, step.noise_std, step.std_dev_t, density)
        assert {tensor.dtype for tensor in tensors} == {torch.float32}
        assert torch.equal(step.mean, wide.mean)

    def test_a_row_does_not_depend_on_its_neighbours(self, instance: SdeBackend) -> None:
        x, v, sigma_B, next_B = inputs(9, (4, 5, 7))
        target = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        step = transition_of(instance, x, v, sigma_B, next_B)
        density_B = instance.log_prob(target, step)
        for row in range(9):
            only = slice(row, row + 1)
            alone = transition_of(instance, x[only], v[only], sigma_B[only], next_B[only])
            assert torch.equal(alone.mean, step.mean[only])
            assert torch.equal(alone.noise_std, step.noise_std[only])
            assert torch.equal(instance.log_prob(target[only], alone), density_B[only])

    def test_same_inputs_give_the_same_bits(self, instance: SdeBackend) -> None:
        first, second = (transition_of(instance, *inputs(2, IMAGE)) for _ in range(2))
        assert torch.equal(first.mean, second.mean)

    def test_draws_have_the_mean_and_std_of_the_transition(self, instance: SdeBackend) -> None:
        x, v, sigma_B, next_B = inputs(1, (1,))
        step = transition_of(
            instance, *(t.repeat(DRAWS, 1) for t in (x, v)), *many(sigma_B, next_B)
        )
        drawn = draw(step.mean, step.noise_std, standard_normal())
        bound = 4 * float(step.noise_std[0]) / math.sqrt(DRAWS)
        assert abs(float(drawn.mean() - step.mean[0, 0])) <= bound + 1e-6
        assert abs(float(drawn.std() - step.noise_std[0])) <= bound + 1e-6

    def test_a_short_step_keeps_the_marginal_distribution(self, instance: SdeBackend) -> None:
        """Data is the point 1.5, so the velocity is known: latents at sigma are N(1.5 (1 - s), s^2)."""
        sigma, after, clean = 0.5, 0.49, 1.5
        noise = standard_normal(seed=3)
        x, v = (1 - sigma) * clean + sigma * noise, noise - clean
        step = transition_of(instance, x, v, *many(torch.tensor([sigma]), torch.tensor([after])))
        drawn = draw(step.mean, step.noise_std, standard_normal(seed=4))
        assert float(drawn.mean()) == pytest.approx((1 - after) * clean, abs=0.01)
        assert float(drawn.std()) == pytest.approx(after, rel=0.01)

    def test_log_prob_is_the_closed_form(self, instance: SdeBackend, section: Any) -> None:
        step = transition_of(instance, *inputs(2, VIDEO))
        noise = torch.randn(step.mean.shape, generator=torch.Generator().manual_seed(2))
        target = draw(step.mean, step.noise_std, noise)
        assert torch.allclose(
            instance.log_prob(target, step).double(),
            closed_form(target, step, full=instance.has_density and not section.log_prob_no_const),
            atol=2e-6,
        )

    def test_log_prob_is_a_mean_over_elements(self, instance: SdeBackend) -> None:
        x, v, sigma_B, next_B = inputs(2, IMAGE)
        target = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        once = instance.log_prob(target, transition_of(instance, x, v, sigma_B, next_B))
        x2, v2, target2 = (torch.cat([tensor, tensor], 1) for tensor in (x, v, target))
        twice = instance.log_prob(target2, transition_of(instance, x2, v2, sigma_B, next_B))
        assert torch.allclose(once, twice, atol=1e-6)

    def test_without_noise_it_is_the_euler_step(self, near_silent: SdeBackend) -> None:
        x, v, sigma_B, next_B = inputs(2, IMAGE)
        step = transition_of(near_silent, x, v, sigma_B, next_B)
        euler = x + v * (next_B - sigma_B).reshape(-1, 1, 1, 1)
        assert torch.allclose(step.mean, euler, atol=1e-5)
        assert float(step.noise_std.max()) < 1e-3

    def test_the_gradient_reaches_the_velocity_through_the_mean_alone(
        self, instance: SdeBackend
    ) -> None:
        x, v, sigma_B, next_B = inputs(2, IMAGE)
        target = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        v.requires_grad_()
        target.requires_grad_()
        step = transition_of(instance, x, v, sigma_B, next_B)
        assert not step.noise_std.requires_grad
        assert not step.std_dev_t.requires_grad
        total = instance.log_prob(target, step).sum()
        slope, recorded = torch.autograd.grad(total, (v, target), allow_unused=True)
        assert slope is not None
        assert float(slope.abs().max()) > 0
        assert recorded is None

    @pytest.mark.parametrize("edge", EDGE_STEPS)
    def test_first_and_last_steps_are_finite(
        self, instance: SdeBackend, edge: tuple[float, float, float]
    ) -> None:
        x, v, _, _ = inputs(2, IMAGE)
        sigma_B, next_B, max_B = (torch.full((2,), value) for value in edge)
        step = instance.transition(x, v, sigma_B, next_B, sigma_max_B=max_B)
        drawn = draw(step.mean, step.noise_std, torch.ones_like(x))
        for tensor in (step.mean, step.noise_std, step.std_dev_t, instance.log_prob(drawn, step)):
            assert torch.isfinite(tensor).all()

    def test_noise_level_zero_is_refused(
        self, catalog: Catalog, options: Any, section: Any
    ) -> None:
        self.require("density")
        silent = SimpleNamespace(**{**vars(section), "noise_level": 0.0})
        with pytest.raises(BadInput, match="noise level 0 gives no density"):
            catalog.create(*self.component, options, Context(section=silent))


def inputs(rows: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return latents and velocities ``(B, *L)``, and sigmas that differ from row to row ``(B,)``."""
    generator = torch.Generator().manual_seed(rows)
    x, v = (torch.randn(rows, *shape, generator=generator) for _ in range(2))
    sigma_B = torch.linspace(0.9, 0.3, rows)
    return x, v, sigma_B, sigma_B * 0.9


def transition_of(
    backend: SdeBackend, x: Tensor, v: Tensor, sigma_B: Tensor, next_B: Tensor
) -> Transition:
    """Return the step of a table whose second entry is 0.96."""
    return backend.transition(
        x, v, sigma_B, next_B, sigma_max_B=torch.full_like(sigma_B, SIGMA_MAX)
    )


def many(*values_B: Tensor) -> tuple[Tensor, ...]:
    """Repeat one-row vectors for every draw."""
    return tuple(values.expand(DRAWS) for values in values_B)


def standard_normal(seed: int = 0) -> Tensor:
    """Return ``(DRAWS, 1)``."""
    return torch.randn(DRAWS, 1, generator=torch.Generator().manual_seed(seed))


def closed_form(target: Tensor, step: Transition, *, full: bool) -> Tensor:
    """Return the log-density in float64: torch's own Gaussian, or the form without std and constants."""
    mean = step.mean.double()
    if full:
        std = step.noise_std.double().reshape(-1, *[1] * (mean.dim() - 1)).expand_as(mean)
        return (
            -torch.nn.functional.gaussian_nll_loss(
                mean, target.double(), std**2, full=True, reduction="none"
            )
            .flatten(1)
            .mean(1)
        )
    return -((target.double() - mean) ** 2).flatten(1).mean(1)
