"""Coefficients-preserving steps: closed forms, edges, and golden numbers of flow_grpo, sglang and miles."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.api import BadInput, Context, Transition
from drl.mathematics.gaussian import draw
from drl.testing.golden import load_golden
from drl_sde_cps import plugin
from drl_sde_cps.cps import CpsSde


def cps(noise_level: float = 0.7) -> CpsSde:
    section = SimpleNamespace(type="cps", noise_level=noise_level, log_prob_no_const=True)
    return CpsSde(None, Context(section=section))


def step_of(backend: CpsSde, x: Tensor, v: Tensor, sigma: float, after: float) -> Transition:
    here_B, after_B = (torch.full((x.shape[0],), value) for value in (sigma, after))
    return backend.transition(x, v, here_B, after_B, sigma_max_B=here_B)


def close(ours: Tensor, theirs: Any, *, relative: float = 0.0, absolute: float) -> bool:
    expected = torch.tensor(theirs, dtype=torch.float64)
    return torch.allclose(ours.double(), expected, rtol=relative, atol=absolute)


def golden_step(golden: Any, case: Any) -> tuple[Transition, Tensor, Tensor]:
    data = golden["inputs"][case["layout"]]
    x, v, noise, given = (torch.tensor(data[k]) for k in ("x", "v", "noise", "x_next_given"))
    step = step_of(cps(case["noise_level"]), x, v, case["sigma"], case["sigma_next"])
    return step, draw(step.mean, step.noise_std, noise), given


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_golden_steps_of_flow_grpo(precision: str) -> None:
    golden = load_golden("cps")
    for case in golden["cases"]:
        step, drawn, given = golden_step(golden, case)
        theirs = case["flow_grpo"][precision]
        # at noise level 1 the root is exactly 0 here; in fp64 its arguments may differ by 1e-8
        limit = {"absolute": 2e-6, "relative": 2e-6}
        assert close(step.mean, theirs["mean"], **limit), case["id"]
        assert close(drawn, theirs["next_sample"], **limit), case["id"]
        assert close(step.std_dev_t, theirs["std_dev_t"], **limit), case["id"]
        assert close(cps().log_prob(drawn, step), theirs["log_prob_own"], **limit), case["id"]
        assert close(cps().log_prob(given, step), theirs["log_prob_given"], **limit), case["id"]


def test_golden_steps_of_sglang_and_of_miles_with_its_clamp() -> None:
    golden = load_golden("cps")
    for case in golden["cases"]:
        step, drawn, given = golden_step(golden, case)
        engine, miles = case["sglang"], case["miles"]
        assert close(step.mean, engine["mean"], absolute=2e-6, relative=2e-6), case["id"]
        assert close(drawn, engine["next_sample"], absolute=2e-6, relative=2e-6), case["id"]
        own = cps().log_prob(drawn, step)
        assert close(own, engine["log_prob_no_const"], absolute=2e-6), case["id"]
        clamped = case["noise_level"] == 1.0 or case["sigma_next"] == 0.0
        assert close(step.mean, miles["mean"], absolute=6e-6 if clamped else 2e-6), case["id"]
        # miles takes sigma as timestep / 1000, and its clamp moves the mean: 2 |x - mean| 5e-6
        limit = 2e-5 if clamped else 3e-6
        assert close(cps().log_prob(given, step), miles["log_prob_given"], absolute=limit)


def test_golden_step_from_a_bf16_prediction() -> None:
    golden = load_golden("flow_sde")
    case = golden["bf16_model_output"]
    sigmas = golden["tables"][case["table"]]["sigmas"]
    x, noise = (torch.tensor(golden["inputs"]["image"][key]) for key in ("x", "noise"))
    here, after = sigmas[case["step"]], sigmas[case["step"] + 1]
    step = step_of(cps(), x, torch.tensor(case["v_bf16"]).bfloat16(), here, after)
    drawn = draw(step.mean, step.noise_std, noise)
    assert close(step.mean, case["cps"]["mean"], absolute=2e-6, relative=2e-6)
    assert torch.equal(drawn.bfloat16().float(), torch.tensor(case["cps"]["next_sample"]))


def test_a_step_by_hand() -> None:
    """Noise level 1/3: sin(pi / 6) = 0.5, so std is half of the next sigma."""
    step = step_of(cps(1 / 3), torch.tensor([[2.0]]), torch.tensor([[-1.0]]), 0.5, 0.4)
    assert float(step.noise_std) == pytest.approx(0.2)
    assert float(step.mean) == pytest.approx(2.5 * 0.6 + 1.5 * math.sqrt(0.12), rel=1e-6)


@pytest.mark.parametrize("noise_level", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("after", [0.8, 0.1])
def test_noise_kept_and_added_make_up_the_level_of_the_schedule(
    noise_level: float, after: float
) -> None:
    """The coefficient of the predicted noise and the std: squares sum to the next sigma squared."""
    step = step_of(cps(noise_level), torch.tensor([[0.9]]), torch.tensor([[1.0]]), 0.9, after)
    kept = float(step.mean)  # clean estimate 0, predicted noise 1
    assert kept**2 + float(step.noise_std) ** 2 == pytest.approx(after**2, rel=1e-5)


def test_a_large_step_keeps_the_marginal_distribution() -> None:
    """Data is the point 1.5: after one step from 0.9 to 0.3 latents are N(1.5 * 0.7, 0.3^2)."""
    generator = torch.Generator().manual_seed(0)
    noise, fresh = (torch.randn(100_000, 1, generator=generator) for _ in range(2))
    step = step_of(cps(0.7), 0.15 + 0.9 * noise, noise - 1.5, 0.9, 0.3)
    drawn = draw(step.mean, step.noise_std, fresh)
    assert float(drawn.mean()) == pytest.approx(1.05, abs=0.005)
    assert float(drawn.std()) == pytest.approx(0.3, rel=0.01)


@pytest.mark.parametrize("after", torch.linspace(0.01, 0.99, 40).tolist())
def test_full_noise_never_takes_the_root_of_a_negative_number(after: float) -> None:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    for level in (1.0, 0.9999999, 1.0000001):
        assert torch.isfinite(step_of(cps(level), x, x, 1.0, after).mean).all()


def test_the_last_step_is_the_clean_estimate_without_noise() -> None:
    x, v = torch.tensor([[2.0, 1.0]]), torch.tensor([[-1.0, 0.5]])
    step = step_of(cps(), x, v, 0.25, 0.0)
    assert step.mean.tolist() == [[2.25, 0.875]]
    assert step.noise_std.tolist() == step.std_dev_t.tolist() == [0.0]
    assert cps().log_prob(step.mean, step).tolist() == [0.0]


def test_the_full_log_prob_form_is_refused() -> None:
    section = SimpleNamespace(type="cps", noise_level=0.7, log_prob_no_const=False)
    with pytest.raises(BadInput, match=r"sde\.log_prob_no_const is false.*set it to true"):
        CpsSde(None, Context(section=section))


@pytest.mark.parametrize(
    ("kind", "no_const", "problems"), [("cps", False, 1), ("cps", True, 0), ("sde", False, 0)]
)
def test_the_recipe_check_asks_for_the_form_that_exists(
    kind: str, no_const: bool, problems: int
) -> None:
    recipe = SimpleNamespace(sde=SimpleNamespace(type=kind, log_prob_no_const=no_const))
    found = list(plugin.drl_check_recipe(recipe=recipe))
    assert [problem.path for problem in found] == ["sde.log_prob_no_const"] * problems
