"""The SDE contract fails on steps that drift, mix rows, lose precision or let gradients astray."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from contract_runs import Verdict, judged, offered, plugin_in
from torch import Tensor

from drl.api import (
    API_VERSION,
    BadInput,
    Component,
    Context,
    SdeBackend,
    Transition,
    hookimpl,
)
from drl.catalog import Catalog
from drl.testing.contracts.sde_backend import SdeBackendContract

DRL_API = API_VERSION


def spread(values_B: Tensor, like: Tensor) -> Tensor:
    return values_B.reshape(-1, *[1] * (like.dim() - 1))


class Turning(SdeBackend):
    """An honest step: part of the predicted noise is replaced by fresh noise of the same size.

    The latents at sigma are ``(1 - sigma) x0 + sigma e``; the velocity is ``e - x0``. The wrong
    backends change one thing each.
    """

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        if context.section.noise_level == 0:
            raise BadInput("noise level 0 gives no density; raise sde.noise_level")

    def transition(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma_B: Tensor,
        sigma_next_B: Tensor,
        *,
        sigma_max_B: Tensor,
    ) -> Transition:
        x, v = latents.float(), velocity.float()
        clean, noise = x - spread(sigma_B, x) * v, x + spread(1 - sigma_B, x) * v
        std_B = sigma_next_B * math.sin(self.context.section.noise_level)
        kept_B = (sigma_next_B**2 - std_B**2).sqrt()
        mean = spread(1 - sigma_next_B, x) * clean + spread(kept_B, x) * noise
        return Transition(mean=mean, noise_std=std_B, std_dev_t=std_B)

    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        squared = (next_latents.detach().float() - transition.mean) ** 2
        return torch.stack([-row.mean() for row in squared.unbind(0)])


class Changed(Turning):
    """The honest step with one thing changed: ``change`` gets it with its inputs."""

    def transition(self, *inputs: Tensor, sigma_max_B: Tensor) -> Transition:  # type: ignore[override]
        return self.change(super().transition(*inputs, sigma_max_B=sigma_max_B), *inputs)

    def change(self, step: Transition, *inputs: Tensor) -> Transition:
        return step


class Narrow(Changed):
    """Answers in the dtype of its inputs."""

    def change(self, step: Transition, *inputs: Tensor) -> Transition:
        mean = step.mean.to(inputs[0].dtype)
        return Transition(mean=mean, noise_std=step.noise_std, std_dev_t=step.std_dev_t)


class Column(Changed):
    """Gives the deviation an axis too many."""

    def change(self, step: Transition, *inputs: Tensor) -> Transition:
        return Transition(
            mean=step.mean, noise_std=step.noise_std[:, None], std_dev_t=step.std_dev_t
        )


class Centring(Changed):
    """Subtracts the mean of the batch."""

    def change(self, step: Transition, *inputs: Tensor) -> Transition:
        mean = step.mean - step.mean.mean(0, keepdim=True)
        return Transition(mean=mean, noise_std=step.noise_std, std_dev_t=step.std_dev_t)


class Restless(Changed):
    """Adds the noise itself, although engine and trainer must share the mean."""

    def change(self, step: Transition, *inputs: Tensor) -> Transition:
        mean = step.mean + torch.randn_like(step.mean)
        return Transition(mean=mean, noise_std=step.noise_std, std_dev_t=step.std_dev_t)


class Adding(Changed):
    """Adds noise without taking any away, as a sampler that keeps the Euler mean does."""

    def change(self, step: Transition, *inputs: Tensor) -> Transition:
        x, v, sigma_B, next_B = inputs
        mean = x.float() + spread(next_B - sigma_B, x) * v.float()
        return Transition(mean=mean, noise_std=step.noise_std, std_dev_t=step.std_dev_t)


class Backwards(Changed):
    """Takes the velocity to point from noise to data."""

    def change(self, step: Transition, *inputs: Tensor) -> Transition:
        x, v, sigma_B, next_B = inputs
        mean = x.float() - spread(next_B - sigma_B, x) * v.float()
        return Transition(mean=mean, noise_std=step.noise_std, std_dev_t=step.std_dev_t)


class Learning(Changed):
    """Makes the deviation depend on what the model says."""

    def change(self, step: Transition, *inputs: Tensor) -> Transition:
        std_B = step.noise_std * (1 + 0 * inputs[1].float().flatten(1).mean(1))
        return Transition(mean=step.mean, noise_std=std_B, std_dev_t=step.std_dev_t)


class Dividing(Changed):
    """Divides by 1 - sigma, which is 0 on the first step."""

    def change(self, step: Transition, *inputs: Tensor) -> Transition:
        std_B = step.noise_std / (1 - inputs[2])
        return Transition(mean=step.mean, noise_std=std_B, std_dev_t=step.std_dev_t)


class Summing(Turning):
    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        squared = (next_latents.detach().float() - transition.mean) ** 2
        return -squared.flatten(1).sum(1)


class Leaking(Turning):
    """Lets the gradient into the recorded latents."""

    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        squared = (next_latents.float() - transition.mean) ** 2
        return torch.stack([-row.mean() for row in squared.unbind(0)])


class Frozen(Turning):
    """Cuts the gradient on its way to the model."""

    def log_prob(self, next_latents: Tensor, transition: Transition) -> Tensor:
        return super().log_prob(next_latents, transition).detach().requires_grad_()


class Lenient(Turning):
    """Takes noise level 0, where every log-prob is that of a point."""

    def __init__(self, options: Any, context: Context) -> None:
        SdeBackend.__init__(self, options, context)


class Hidden(Turning):
    """Says that it has no density, although its component does."""

    has_density = False


NEIGHBOURS = "test_a_row_does_not_depend_on_its_neighbours"
MARGINAL = "test_a_short_step_keeps_the_marginal_distribution"
EULER = "test_without_noise_it_is_the_euler_step"
GRADIENT = "test_the_gradient_reaches_the_velocity_through_the_mean_alone"

CASES: list[tuple[type[Turning], str, str]] = [
    (Narrow, "test_low_precision_inputs_give_float32", "torch.bfloat16"),
    (Column, "test_shapes", "torch.Size([3, 1])"),
    (Centring, NEIGHBOURS, "torch.equal"),
    (Restless, "test_same_inputs_give_the_same_bits", "torch.equal"),
    (Restless, "test_draws_have_the_mean_and_std_of_the_transition", "bound"),
    (Adding, MARGINAL, "± 0.0049"),
    (Backwards, MARGINAL, "± 0.01"),
    (Backwards, EULER, "allclose"),
    (Learning, GRADIENT, "step.noise_std.requires_grad"),
    (Leaking, GRADIENT, "recorded is None"),
    (Frozen, GRADIENT, "slope is not None"),
    (Dividing, "test_first_and_last_steps_are_finite", "torch.isfinite(tensor).all()"),
    (Summing, "test_log_prob_is_a_mean_over_elements", "once, twice"),
    (Summing, "test_log_prob_is_the_closed_form", "closed_form"),
    (Lenient, "test_noise_level_zero_is_refused", "DID NOT RAISE"),
    (Hidden, "test_density_is_declared_as_it_is", "has_density"),
]


@hookimpl
def drl_register_sde_backends() -> list[Component]:
    return offered([Turning, *[case[0] for case in CASES]], facts={"has_density": True})


class Checks(SdeBackendContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("sde_backend", "turning")

    @pytest.fixture
    def catalog(self) -> Catalog:
        return plugin_in(__name__)

    @pytest.fixture
    def section(self) -> Any:
        return SimpleNamespace(noise_level=0.7, log_prob_no_const=True)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    cases = [(wrong, check) for wrong, check, _ in CASES]
    return judged(Checks, tmp_path_factory.mktemp("checks"), cases, honest=Turning)


def test_an_honest_backend_passes_every_check(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["Turning"]
    assert (found.failed, found.skipped) == ({}, {})
    assert {case[1] for case in CASES} <= found.passed


@pytest.mark.parametrize(("wrong", "check", "said"), CASES)
def test_a_wrong_backend_is_caught(
    verdicts: dict[str, Verdict], wrong: type[Turning], check: str, said: str
) -> None:
    assert said in verdicts[wrong.__name__].failed[check]
