"""Constant-noise steps: closed forms, edges, and the golden numbers of DanceGRPO and flow_grpo."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.api import BadInput, Context, Transition
from drl.mathematics.gaussian import draw
from drl.testing.golden import load_golden
from drl_sde_dance.dance import DanceSde


def dance(noise_level: float = 0.7, *, no_const: bool = False) -> DanceSde:
    section = SimpleNamespace(type="dance", noise_level=noise_level, log_prob_no_const=no_const)
    return DanceSde(None, Context(section=section))


def step_of(backend: DanceSde, x: Tensor, v: Tensor, sigma: float, after: float) -> Transition:
    here_B, after_B = (torch.full((x.shape[0],), value) for value in (sigma, after))
    return backend.transition(x, v, here_B, after_B, sigma_max_B=here_B)


def close(ours: Tensor, theirs: Any, *, relative: float = 0.0, absolute: float = 0.0) -> bool:
    expected = torch.tensor(theirs, dtype=torch.float64)
    return torch.allclose(ours.double(), expected, rtol=relative, atol=absolute)


def golden_step(golden: Any, case: Any) -> tuple[Transition, Tensor, Tensor]:
    """Return the step of a golden case, its next sample and the given next latent."""
    data = golden["inputs"][case["layout"]]
    x, v, noise, given = (torch.tensor(data[k]) for k in ("x", "v", "noise", "x_next_given"))
    step = step_of(dance(case["eta"]), x, v, case["sigma"], case["sigma_next"])
    return step, draw(step.mean, step.noise_std, noise), given


def distance(ours: Tensor, theirs: Any) -> float:
    """Largest difference relative to ``1 + |value|``; the golden page asks for at most 2e-6."""
    expected = torch.tensor(theirs, dtype=torch.float64)
    return float(((ours.double() - expected).abs() / (1 + expected.abs())).max())


def quantities(golden: Any, case: Any) -> dict[str, Tensor]:
    """Return what a golden case holds, as this backend computes it."""
    step, drawn, given = golden_step(golden, case)
    backend = dance(case["eta"])
    return {
        "mean": step.mean,
        "next_sample": drawn,
        "log_prob_own": backend.log_prob(drawn, step),
        "log_prob_given": backend.log_prob(given, step),
    }


def test_golden_steps_of_dance_grpo_in_float64() -> None:
    golden = load_golden("dance_grpo_step")
    for case in golden["cases"]:
        theirs = case["fp64"]
        for name, ours in quantities(golden, case).items():
            assert distance(ours, theirs[name]) < 2e-6, (case["id"], name)
        step, drawn, _ = golden_step(golden, case)
        assert close(step.noise_std, [theirs["noise_std"]] * len(drawn), relative=1e-6)
        assert close(step.std_dev_t, [case["eta"]] * len(drawn), relative=1e-6)


def test_golden_steps_of_dance_grpo_in_float32() -> None:
    """All but the last step from 0.001, where DanceGRPO's own float32 is off from its float64.

    It divides by sigma squared there; this backend stays at the float64 numbers.
    """
    golden = load_golden("dance_grpo_step")
    compared = 0
    for case in golden["cases"]:
        theirs = case["fp32"]
        if case["sigma"] == 0.001:
            exact = case["fp64"]["mean"]
            off = distance(torch.tensor(theirs["mean"], dtype=torch.float64), exact)
            assert off > 2e-6, case["id"]
            assert distance(quantities(golden, case)["mean"], exact) < off / 10, case["id"]
            continue
        compared += 1
        for name, ours in quantities(golden, case).items():
            assert distance(ours, theirs[name]) < 2e-6, (case["id"], name)
    assert compared == 20


def test_golden_flow_sde_steps_where_its_scale_is_eta() -> None:
    """Any Flow-SDE step is this one with eta set to the ``std_dev_t`` that flow_grpo found."""
    golden = load_golden("flow_sde")
    for case in golden["cases"]:
        theirs = case["flow_grpo"]["fp64"]
        scale = torch.tensor(theirs["std_dev_t"]).flatten()
        step, _, _ = golden_step(golden, case | {"eta": float(scale[0])})
        assert distance(step.mean, theirs["mean"]) < 2e-6, case["id"]
        noise_std = torch.tensor(theirs["noise_std"]).flatten().tolist()
        assert close(step.noise_std, noise_std, relative=1e-6), case["id"]


def test_a_step_by_hand() -> None:
    """sigma 0.5, eta 0.6, dt -0.1: noise 1.5, its factor 0.36; the velocity grows from -1 to -0.46."""
    step = step_of(dance(0.6), torch.tensor([[2.0]]), torch.tensor([[-1.0]]), 0.5, 0.4)
    assert float(step.mean) == pytest.approx(2.0 + 0.46 * 0.1)
    assert float(step.noise_std) == pytest.approx(0.6 * math.sqrt(0.1))
    assert float(step.std_dev_t) == pytest.approx(0.6)


def test_a_log_prob_by_hand() -> None:
    """One element two deviations away: -2 - ln std - ln sqrt(2 pi)."""
    step = step_of(dance(0.5), torch.zeros(1, 1), torch.zeros(1, 1), 0.75, 0.5)
    assert float(step.noise_std) == 0.25
    expected = -2 - math.log(0.25) - math.log(math.sqrt(2 * math.pi))
    assert float(dance().log_prob(step.mean + 0.5, step)) == pytest.approx(expected)
    assert float(dance(no_const=True).log_prob(step.mean + 0.5, step)) == pytest.approx(-0.25)


@pytest.mark.parametrize("sigma", [1.0, 0.999993, 0.5, 0.25])
def test_the_noise_depends_on_the_length_of_the_step_alone(sigma: float) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    step = step_of(dance(0.3), x, x, sigma, sigma - 0.25)
    assert step.std_dev_t.tolist() == pytest.approx([0.3, 0.3])
    assert step.noise_std.tolist() == pytest.approx([0.15, 0.15])


def test_the_second_entry_of_the_sigma_table_plays_no_part() -> None:
    x = torch.ones(1, 2)
    means = [
        dance()
        .transition(x, x, torch.ones(1), torch.tensor([0.9]), sigma_max_B=torch.tensor([second]))
        .mean
        for second in (0.9, 0.1)
    ]
    assert torch.equal(*means)


@pytest.mark.parametrize(("sigma", "after"), [(1.0, 0.96), (0.5, 0.4), (0.01, 0.0)])
def test_without_noise_the_mean_goes_to_the_euler_step_as_eta_squared(
    sigma: float, after: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(2, 4, 3, generator=generator) for _ in range(2))
    euler = x + v * (after - sigma)
    far, near = (step_of(dance(eta), x, v, sigma, after).mean - euler for eta in (0.1, 0.01))
    assert torch.allclose(near, far / 100, atol=1e-6)
    silent = step_of(dance(1e-12), x, v, sigma, after).mean
    assert torch.equal(silent, x + v * (torch.tensor(after) - torch.tensor(sigma)))


@pytest.mark.parametrize("eta", [0.3, 1.0])
@pytest.mark.parametrize(("sigma", "after"), [(0.9, 0.3), (0.5, 0.4), (0.25, 0.0)])
def test_the_variance_above_that_of_the_schedule(eta: float, sigma: float, after: float) -> None:
    """The noise kept and the noise added: squares sum to n^2 and an excess of second order in dt."""
    step = step_of(dance(eta), torch.tensor([[sigma]]), torch.tensor([[1.0]]), sigma, after)
    kept = float(step.mean)  # clean estimate 0, predicted noise 1
    dt = after - sigma
    excess = eta**2 * dt**2 / sigma + (eta**2 * dt / (2 * sigma)) ** 2
    assert kept**2 + float(step.noise_std) ** 2 == pytest.approx(after**2 + excess, rel=1e-5)


def test_the_variance_along_paths_is_that_of_the_marginals() -> None:
    """Data N(1, 0.5^2) has a known velocity; 20,000 paths in 200 steps keep mean and std."""
    generator = torch.Generator().manual_seed(0)
    sigmas = torch.linspace(1.0, 0.0, 201)
    center, spread = 1.0, 0.5
    x = torch.randn(20_000, 1, generator=generator)
    backend = dance(0.5)
    for here, after in itertools.pairwise(sigmas.tolist()):
        variance = ((1 - here) * spread) ** 2 + here**2
        residual = x - (1 - here) * center
        v = -center + residual * (here - (1 - here) * spread**2) / variance
        step = step_of(backend, x, v, here, after)
        x = draw(step.mean, step.noise_std, torch.randn(x.shape, generator=generator))
        expected = math.sqrt(((1 - after) * spread) ** 2 + after**2)
        assert float(x.std()) == pytest.approx(expected, rel=0.03)
        assert float(x.mean()) == pytest.approx((1 - after) * center, abs=0.02)


def test_the_last_step_has_noise_and_a_density() -> None:
    x, v = torch.tensor([[2.0, 1.0]]), torch.tensor([[-1.0, 0.5]])
    step = step_of(dance(0.4), x, v, 0.25, 0.0)
    assert float(step.noise_std) == pytest.approx(0.2)
    assert torch.isfinite(dance().log_prob(step.mean, step)).all()


def test_noise_level_zero_is_refused_with_the_way_out() -> None:
    with pytest.raises(BadInput, match=r"noise level 0 gives no density.*sde\.type = \"ode\""):
        dance(0.0)
