"""What the KL term divides by: the scale of a step, without the root of its length."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from drl.api import (
    VISUAL,
    Context,
    ForwardInputs,
    Pair,
    PairBatch,
    Predictions,
    ScoredTransition,
)
from drl.catalog import Catalog
from drl.testing.golden import load_golden
from drl_loss_flow_grpo.config import PolicyLossConfig
from drl_loss_flow_grpo.loss import PolicyLoss


def kl(mean: Tensor, other: Tensor, scale_B: Tensor) -> float:
    """The KL term that the loss reports for these means and this scale."""
    count = len(mean)
    section = SimpleNamespace(kl_beta=0.1, adv_clip_max=5.0, ref_mode="lora_base")
    zero_B, one_B = torch.zeros(count), torch.ones(count)
    pairs = PairBatch(
        pairs=tuple(Pair(id=(n, 0), unit=n, sigma=0.5, tensors={}) for n in range(count)),
        tensors={},
        values={"advantage": zero_B, "log_prob_old": zero_B},
        weight_B=one_B,
        sigma_B=one_B / 2,
        timestep_B=None,
    )
    scored = ScoredTransition(
        mean={VISUAL: mean},
        std_dev_t_B={VISUAL: scale_B},
        log_prob_B={VISUAL: zero_B},
        reference_mean={VISUAL: other},
    )
    loss = PolicyLoss(PolicyLossConfig(), Context(section=section))
    nothing = ForwardInputs(streams={}), Predictions(trained={})
    metric = loss.compute(pairs, *nothing, scored).metrics["kl_loss"]
    return float(metric.total / metric.count)


@pytest.mark.parametrize(("step", "factor"), [(0, 25.0), (4, 12.0), (9, 112.0)])
def test_the_noise_would_divide_by_minus_dt_more(
    catalog: Catalog, step: int, factor: float
) -> None:
    """Stable Diffusion 3, 10 steps: by the noise's variance a KL would be ``1 / -dt`` times as large."""
    table = load_golden("policy_loss")["tables"]["sd3_shift3_10"]["sigmas"]
    section = SimpleNamespace(noise_level=0.7, log_prob_no_const=False)
    backend = catalog.create("sde_backend", "sde", None, Context(section=section))
    x, v, other = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    here_B, after_B, max_B = (torch.full((2,), table[n]) for n in (step, step + 1, 1))
    first = backend.transition(x, v, here_B, after_B, sigma_max_B=max_B)
    second = backend.transition(x, other, here_B, after_B, sigma_max_B=max_B)
    by_scale = kl(first.mean, second.mean, first.std_dev_t)
    by_noise = kl(first.mean, second.mean, first.noise_std)
    assert by_noise / by_scale == pytest.approx(factor, rel=0.03)
    assert factor == pytest.approx(1 / (table[step] - table[step + 1]), rel=0.03)


@pytest.mark.parametrize("place", range(8))
def test_golden_kl_of_the_other_denominator_is_the_quotient(place: int) -> None:
    golden = load_golden("policy_loss")
    case = golden["chain"][place]
    if case["sde_type"] != "sde":
        pytest.skip("the two denominators are one where the scale is the noise itself")
    sigmas = golden["tables"][case["table"]]["sigmas"]
    length = sigmas[case["step"]] - sigmas[case["step"] + 1]
    assert case["kl_loss_wan_denominator"] * length == pytest.approx(case["kl_loss"], rel=2e-3)


def test_two_gaussians_of_one_scale_differ_by_that_much() -> None:
    """The exact KL of Gaussians of std ``s`` is ``d^2 / (2 s^2)``, a mean over elements here."""
    mean, other, scale_B = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2), torch.tensor([0.5])
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, 0.5), torch.distributions.Normal(other, 0.5)
    )
    assert kl(mean, other, scale_B) == pytest.approx(float(exact.mean()))
    assert math.isclose(float(exact.mean()), (1 + 4) / 2 / 0.5)
