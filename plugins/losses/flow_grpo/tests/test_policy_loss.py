"""The clipped policy loss: numbers by hand, golden numbers of flow_grpo, metrics and refusals."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drl.api import (
    VISUAL,
    BadInput,
    Context,
    ContractError,
    ForwardInputs,
    LossOutput,
    Need,
    Pair,
    PairBatch,
    Predictions,
    ScoredTransition,
    StepContext,
)
from drl.mathematics.objectives import clipped_policy_loss
from drl.testing import make_sample
from drl.testing.golden import load_golden
from drl_loss_flow_grpo.config import PolicyLossConfig
from drl_loss_flow_grpo.loss import PolicyLoss


def policy_loss(clip_range: float = 0.2, kl_beta: float = 0.0, adv_clip: float = 5.0) -> PolicyLoss:
    section = SimpleNamespace(kl_beta=kl_beta, adv_clip_max=adv_clip, ref_mode=None)
    return PolicyLoss(PolicyLossConfig(clip_range=clip_range), Context(section=section))


def batch(
    advantages: list[float], old: list[float], weights: list[float] | None = None
) -> PairBatch:
    count = len(advantages)
    pairs = tuple(Pair(id=(7, i), unit=7, sigma=0.5, tensors={}) for i in range(count))
    return PairBatch(
        pairs=pairs,
        tensors={},
        values={"advantage": torch.tensor(advantages), "log_prob_old": torch.tensor(old)},
        weight_B=torch.tensor(weights or [1.0] * count),
        sigma_B=torch.full((count,), 0.5),
        timestep_B=None,
    )


def scored(
    log_prob_B: Tensor,
    mean: Tensor | None = None,
    reference: Tensor | None = None,
    std_dev_t_B: Tensor | None = None,
) -> ScoredTransition:
    count = log_prob_B.shape[0]
    return ScoredTransition(
        mean={VISUAL: torch.zeros(count, 2) if mean is None else mean},
        std_dev_t_B={VISUAL: torch.ones(count) if std_dev_t_B is None else std_dev_t_B},
        log_prob_B={VISUAL: log_prob_B},
        reference_mean=None if reference is None else {VISUAL: reference},
    )


def compute(loss: PolicyLoss, pairs: PairBatch, transition: ScoredTransition | None) -> LossOutput:
    return loss.compute(pairs, ForwardInputs(streams={}), Predictions(trained={}), transition)


def figures(output: LossOutput) -> dict[str, float]:
    return {name: float(m.total / m.count) for name, m in output.metrics.items() if m.count > 0}


@pytest.mark.parametrize("place", range(6))
def test_golden_small_numbers(place: int) -> None:
    case = load_golden("policy_loss")["small_numbers"][place]
    new = torch.tensor(case["log_prob_new"], requires_grad=True)
    pairs = batch(case["advantages"], case["log_prob_old"])
    output = compute(policy_loss(case["clip_range"], 0.0, case["adv_clip_max"]), pairs, scored(new))
    (gradient,) = torch.autograd.grad(output.loss / 8, new)
    got = figures(output)
    assert got["policy_loss"] == pytest.approx(case["policy_loss"], abs=1e-6)
    assert got["clipfrac"] == case["clipfrac"]
    assert got["approx_kl"] == pytest.approx(case["approx_kl"], rel=1e-5)
    assert gradient.tolist() == pytest.approx(case["grad_log_prob_new"], rel=1e-5, abs=4e-6)
    ratio = torch.exp(new.detach() - torch.tensor(case["log_prob_old"]))
    assert ratio.tolist() == pytest.approx(case["ratio"], rel=1e-6)
    clipped = torch.tensor(case["advantages_clipped"])
    per_pair = clipped_policy_loss(clipped, ratio, case["clip_range"])
    assert per_pair.tolist() == pytest.approx(case["per_pair"], rel=1e-6, abs=1e-9)


def test_core_is_told_where_ratios_are_clipped() -> None:
    assert policy_loss(clip_range=0.2).ratio_width == 0.2


def test_ratio_one_gives_minus_the_advantage() -> None:
    output = compute(
        policy_loss(), batch([1.5, -0.5], [-1.0, -2.0]), scored(torch.tensor([-1.0, -2.0]))
    )
    assert float(output.loss) == -1.0
    got = figures(output)
    assert (got["ratio_mean"], got["ratio_abs_minus_1"], got["clipfrac"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "has_gradient"),
    [
        (1.0, 1.5, -1.2, False),
        (1.0, 0.5, -0.5, True),
        (-1.0, 1.5, 1.5, True),
        (-1.0, 0.5, 0.8, False),
        (1.0, 1.1, -1.1, True),
    ],
)
def test_the_clip_is_pessimistic(
    advantage: float, ratio: float, expected: float, has_gradient: bool
) -> None:
    """Gains beyond the clip are not rewarded, losses beyond it still count."""
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    output = compute(policy_loss(0.2), batch([advantage], [0.0]), scored(new))
    (gradient,) = torch.autograd.grad(output.loss, new)
    assert float(output.loss.detach()) == pytest.approx(expected)
    assert (float(gradient) != 0.0) is has_gradient


def test_advantages_are_clamped() -> None:
    output = compute(
        policy_loss(adv_clip=2.0), batch([9.0, -9.0], [0.0, 0.0]), scored(torch.zeros(2))
    )
    assert figures(output)["adv_abs_mean"] == 2.0
    assert float(output.loss) == 0.0


def test_kl_is_the_squared_distance_of_means_over_twice_the_squared_scale() -> None:
    mean = torch.tensor([[1.0, 3.0]], requires_grad=True)
    transition = scored(torch.zeros(1), mean, torch.tensor([[0.0, 1.0]]), torch.tensor([0.5]))
    output = compute(policy_loss(kl_beta=0.04), batch([0.0], [0.0]), transition)
    assert figures(output)["kl_loss"] == pytest.approx(2.5 / 0.5)
    assert float(output.loss.detach()) == pytest.approx(0.04 * 5.0)
    (gradient,) = torch.autograd.grad(output.loss, mean)
    assert gradient.tolist() == [pytest.approx([0.04 * 2.0, 0.04 * 4.0])]


def test_streams_are_summed() -> None:
    transition = ScoredTransition(
        mean={"visual": torch.ones(1, 2), "audio": torch.ones(1, 3)},
        std_dev_t_B={"visual": torch.ones(1), "audio": torch.ones(1)},
        log_prob_B={"visual": torch.tensor([-0.25]), "audio": torch.tensor([-0.5])},
        reference_mean={"visual": torch.zeros(1, 2), "audio": torch.full((1, 3), 3.0)},
    )
    got = figures(compute(policy_loss(kl_beta=0.1), batch([1.0], [-0.75]), transition))
    assert got["ratio_mean"] == 1.0
    assert got["kl_loss"] == pytest.approx(0.5 + 2.0)


def test_metrics_by_hand() -> None:
    pairs = batch([1.0, -3.0], [-1.0, -1.0])
    got = figures(compute(policy_loss(0.05), pairs, scored(torch.tensor([-0.9, -1.01]))))
    ratios = [math.exp(0.1), math.exp(-0.01)]
    assert got == pytest.approx(
        {
            "adv_abs_mean": 2.0,
            "ratio_mean": sum(ratios) / 2,
            "ratio_abs_minus_1": (ratios[0] - 1 + 1 - ratios[1]) / 2,
            "approx_kl": 0.5 * (0.01 + 0.0001) / 2,
            "clipfrac": 0.5,
            "log_prob_mean_abs_diff": 0.055,
            "policy_loss": (-1.05 + 3 * ratios[1]) / 2,
            "loss": (-1.05 + 3 * ratios[1]) / 2,
            "loss_abs_mean": (1.05 + 3 * ratios[1]) / 2,
            "log_prob_new_idx_0": -0.9,
            "log_prob_old_idx_0": -1.0,
        },
        rel=1e-4,
    )


def test_rows_of_weight_zero_leave_loss_gradient_and_metrics() -> None:
    """Whatever a failed sample holds, NaN included."""
    new = torch.tensor([-1.1, -1.0], requires_grad=True)
    output = compute(policy_loss(), batch([4.0, 1.0], [math.nan, -1.0], [0.0, 1.0]), scored(new))
    (gradient,) = torch.autograd.grad(output.loss, new)
    assert gradient.tolist() == [0.0, -1.0]
    assert figures(output)["loss"] == -1.0
    assert float(output.metrics["loss"].count) == 1.0
    assert float(output.metrics["log_prob_new_idx_0"].count) == 0.0


def test_weights_multiply_the_loss_and_enter_the_mean() -> None:
    output = compute(
        policy_loss(), batch([1.0, 2.0], [0.0, 0.0], [3.0, 1.0]), scored(torch.zeros(2))
    )
    assert float(output.loss) == -5.0
    assert figures(output)["loss"] == -1.25


def test_a_reference_is_needed_only_with_a_kl_term() -> None:
    assert Need.REFERENCE not in policy_loss().needs
    assert policy_loss(kl_beta=0.1).needs == policy_loss().needs | {Need.REFERENCE}
    assert Need.REFERENCE not in PolicyLoss.needs


def test_a_kl_term_without_a_reference_is_refused_with_the_options() -> None:
    with pytest.raises(BadInput, match=r"kl_beta is 0\.1.*ref_mode = \"lora_base\" or \"ema\""):
        compute(policy_loss(kl_beta=0.1), batch([1.0], [0.0]), scored(torch.zeros(1)))


def test_a_kl_term_has_core_look_for_steps_without_noise() -> None:
    assert policy_loss(kl_beta=0.1).divides_by_noise
    assert not policy_loss().divides_by_noise


def test_no_transition_is_refused() -> None:
    with pytest.raises(ContractError, match="needs the scored transition"):
        compute(policy_loss(), batch([1.0], [0.0]), None)


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.0])
def test_clip_ranges_outside_zero_to_one_are_refused(bad: float) -> None:
    with pytest.raises(ValueError):
        PolicyLossConfig(clip_range=bad)


def test_default_clip_range() -> None:
    assert PolicyLossConfig.model_validate({}).clip_range == 1e-4


def test_a_unit_without_advantages_or_with_too_few_is_refused() -> None:
    samples = [make_sample(index=n, steps=2, reward=1.0) for n in range(2)]
    with pytest.raises(ContractError, match="PolicyLoss needs one advantage per sample, got none"):
        policy_loss().expand(samples, None, StepContext())
    for advantages in ([1.0], [1.0, 2.0, 3.0]):
        with pytest.raises(ValueError, match="zip"):
            policy_loss().expand(samples, advantages, StepContext())
    pairs = policy_loss().expand(samples, [1.0, -1.0], StepContext())
    assert [pair.values["advantage"] for pair in pairs] == [1.0, 1.0, -1.0, -1.0]


@pytest.mark.parametrize(
    ("ratio", "share"), [(1.26, 1.0), (1.24, 0.0), (0.76, 0.0), (0.74, 1.0), (1.0, 0.0)]
)
def test_the_share_of_clipped_pairs_counts_both_sides(ratio: float, share: float) -> None:
    new = torch.tensor([math.log(ratio)])
    output = compute(policy_loss(0.25), batch([1.0], [0.0]), scored(new))
    assert figures(output)["clipfrac"] == share


def test_neither_reference_nor_old_log_prob_gets_a_gradient() -> None:
    mean = torch.tensor([[1.0, 2.0]], requires_grad=True)
    other = torch.tensor([[0.0, 0.0]], requires_grad=True)
    new = torch.tensor([-1.0], requires_grad=True)
    output = compute(
        policy_loss(kl_beta=0.5), batch([1.0], [-1.0]), scored(new, mean=mean, reference=other)
    )
    of_mean, of_other = torch.autograd.grad(output.loss, (mean, other), allow_unused=True)
    # d/dm of 0.5 * mean((m - r)^2) / 2 over two elements
    assert of_mean.tolist() == [[0.25, 0.5]]
    assert of_other is None


def test_a_row_of_weight_zero_has_no_gradient_either() -> None:
    new = torch.tensor([-1.0, -1.0], requires_grad=True)
    pairs = batch([1.0, 1.0], [-1.0, float("inf")], [1.0, 0.0])
    output = compute(policy_loss(), pairs, scored(new))
    (gradient,) = torch.autograd.grad(output.loss, new)
    assert gradient.tolist() == [-1.0, 0.0]
    assert figures(output)["log_prob_mean_abs_diff"] == 0.0


@settings(max_examples=100, deadline=None)
@given(st.floats(-4, 4), st.floats(0.2, 3.0), st.floats(0.01, 0.5))
def test_the_clipped_loss_never_rewards_leaving_the_range(
    advantage: float, ratio: float, clip: float
) -> None:
    a, r = torch.tensor([advantage]), torch.tensor([ratio])
    found = clipped_policy_loss(a, r, clip)
    assert float(found) >= float(-a * r) - 1e-6
    inside = r.clamp(1 - clip, 1 + clip)
    assert float(found) >= float(-a * inside) - 1e-6
    assert float(found) in (float(-a * r), float(-a * inside))
