"""GRPO-Guard: numbers by hand, the formula through the real step, what the two corrections are for."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
    SdeBackend,
    StepContext,
    Streams,
)
from drl.catalog import Catalog
from drl.mathematics.gaussian import draw
from drl.testing import make_sample
from drl_loss_grpo_guard.config import GrpoGuardConfig
from drl_loss_grpo_guard.loss import (
    GrpoGuard,
    guarded_loss,
    normalised_ratio,
    velocity_slope,
)

SIGMAS = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.2, 0.0])
STEPS = range(1, 5)


def guard(clip_range: float = 0.2, kl_beta: float = 0.0, adv_clip: float = 5.0) -> GrpoGuard:
    section = SimpleNamespace(kl_beta=kl_beta, adv_clip_max=adv_clip, ref_mode=None)
    return GrpoGuard(GrpoGuardConfig(clip_range=clip_range), Context(section=section))


def batch(
    advantages: list[float],
    old: Tensor,
    *,
    sigma: float = 0.5,
    after: float = 0.25,
    weights: list[float] | None = None,
) -> PairBatch:
    count = len(advantages)
    return PairBatch(
        pairs=tuple(Pair(id=(7, i), unit=7, sigma=sigma, tensors={}) for i in range(count)),
        tensors={},
        values={
            "advantage": torch.tensor(advantages),
            "log_prob_old": old,
            "sigma_next": torch.full((count,), after),
        },
        weight_B=torch.tensor(weights or [1.0] * count),
        sigma_B=torch.full((count,), sigma),
        timestep_B=None,
    )


def scored(log_prob_B: Tensor, std_dev_t: float = 0.8, **means: Streams) -> ScoredTransition:
    count = log_prob_B.shape[0]
    return ScoredTransition(
        mean=means.get("mean", {VISUAL: torch.zeros(count, 2)}),
        std_dev_t_B={VISUAL: torch.full((count,), std_dev_t)},
        log_prob_B={VISUAL: log_prob_B},
        reference_mean=means.get("reference"),
    )


def compute(
    loss: GrpoGuard,
    pairs: PairBatch,
    transition: ScoredTransition | None,
    change: float = 0.0,
) -> LossOutput:
    trained = {VISUAL: torch.full((len(pairs.pairs), 2), change)}
    old = {VISUAL: torch.zeros(len(pairs.pairs), 2)}
    predictions = Predictions(trained=trained, old=old)
    return loss.compute(pairs, ForwardInputs(streams={}), predictions, transition)


def figures(output: LossOutput) -> dict[str, float]:
    return {name: float(m.total / m.count) for name, m in output.metrics.items()}


class Chain:
    """One real step: an old and a new velocity, the next latents drawn under the old one."""

    def __init__(self, catalog: Catalog, step: int, kind: str = "sde", rows: int = 2) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x, self.v_old, self.change, self.noise = (
            torch.randn(rows, 4, 1, 4, 4, generator=generator) for _ in range(4)
        )
        self.sigma, self.after = float(SIGMAS[step]), float(SIGMAS[step + 1])
        section = SimpleNamespace(type=kind, noise_level=0.7, log_prob_no_const=False)
        made = catalog.create("sde_backend", kind, None, Context(section=section))
        self.backend: SdeBackend = made
        self.rows = rows
        self.old = self.step(self.v_old)
        self.next = draw(self.old.mean, self.old.noise_std, self.noise)
        self.old_B = self.backend.log_prob(self.next, self.old)

    def step(self, velocity: Tensor) -> Any:
        here_B, after_B, max_B = (
            torch.full((self.rows,), value) for value in (self.sigma, self.after, float(SIGMAS[1]))
        )
        return self.backend.transition(self.x, velocity, here_B, after_B, sigma_max_B=max_B)

    def run(self, loss: GrpoGuard, velocity: Tensor, advantages: list[float]) -> LossOutput:
        new = self.step(velocity)
        transition = ScoredTransition(
            mean={VISUAL: new.mean},
            std_dev_t_B={VISUAL: new.std_dev_t},
            log_prob_B={VISUAL: self.backend.log_prob(self.next, new)},
        )
        pairs = batch(advantages, self.old_B, sigma=self.sigma, after=self.after)
        predictions = Predictions(trained={VISUAL: velocity}, old={VISUAL: self.v_old})
        return loss.compute(pairs, ForwardInputs(streams={}), predictions, transition)


def test_the_ratio_by_hand() -> None:
    """s = 0.4: exp(0.4 (0.3 + 0.08 / 0.32)) = exp(0.22)."""
    ratio = normalised_ratio(torch.tensor([0.3]), [torch.tensor([0.08])], [torch.tensor([0.4])])
    assert float(ratio) == pytest.approx(math.exp(0.22))


def test_streams_add_their_corrections_and_share_the_average_scale() -> None:
    ratio = normalised_ratio(
        torch.tensor([0.0]),
        [torch.tensor([0.08]), torch.tensor([0.02])],
        [torch.tensor([0.4]), torch.tensor([0.2])],
    )
    assert float(ratio) == pytest.approx(math.exp(0.3 * (0.25 + 0.25)))


def test_the_slope_by_hand() -> None:
    assert float(velocity_slope(torch.tensor(0.5), torch.tensor(0.8))) == pytest.approx(1.32)
    assert float(velocity_slope(torch.tensor(1.0), torch.tensor(3.0))) == 1.0


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (1.0, 1.5, -1.2 / 0.25),
        (1.0, 0.5, -0.5 / 0.25),
        (-1.0, 1.5, 1.5 / 0.25),
        (-1.0, 0.5, 0.8 / 0.25),
        (2.0, 1.1, -2.2 / 0.25),
    ],
)
def test_the_clip_is_pessimistic_and_short_steps_weigh_more(
    advantage: float, ratio: float, expected: float
) -> None:
    found = guarded_loss(
        torch.tensor([advantage]), torch.tensor([ratio]), torch.tensor([0.25]), 0.2
    )
    assert float(found) == pytest.approx(expected)


def test_a_whole_loss_by_hand() -> None:
    """sigma 0.5 to 0.25, std_dev_t 0.8: s = 0.4, slope 0.25 * 1.32 = 0.33, so 1 of velocity moves 0.33."""
    bias = 0.33**2 / (2 * 0.16)
    ratio = math.exp(0.4 * (-0.1 + bias))
    pairs = batch([1.5], torch.tensor([-1.0]))
    output = compute(guard(0.2), pairs, scored(torch.tensor([-1.1])), change=1.0)
    assert 1.0 < ratio < 1.2
    assert float(output.loss) == pytest.approx(-1.5 * ratio / 0.25, rel=1e-6)
    assert figures(output) == pytest.approx(
        {
            "policy_loss": -1.5 * ratio / 0.25,
            "loss": -1.5 * ratio / 0.25,
            "loss_abs_mean": 1.5 * ratio / 0.25,
            "adv_abs_mean": 1.5,
            "ratio_mean": ratio,
            "ratio_abs_minus_1": ratio - 1,
            "clipfrac": 0.0,
            "log_prob_mean_abs_diff": 0.1,
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("kind", ["sde", "dance"])
@pytest.mark.parametrize("step", STEPS)
def test_through_a_real_step_the_log_ratio_is_noise_times_change_of_the_mean(
    catalog: Catalog, kind: str, step: int
) -> None:
    """flow_grpo's formula on means of the backend, and its closed form mean(e (mu - mu_old))."""
    if kind not in catalog.names("sde_backend"):
        pytest.skip(f"no sde_backend {kind!r} is installed")
    chain = Chain(catalog, step, kind)
    velocity = chain.v_old + 0.3 * chain.change
    new = chain.step(velocity)
    dims = (1, 2, 3, 4)
    moved = (new.mean - chain.old.mean).double()
    noise = ((chain.next - chain.old.mean) / chain.old.noise_std.reshape(-1, 1, 1, 1, 1)).double()
    std_B = chain.old.noise_std.double()
    log_ratio_B = (chain.backend.log_prob(chain.next, new) - chain.old_B).double()
    script_B = (log_ratio_B + moved.square().mean(dims) / (2 * std_B**2)) * std_B
    ratio = figures(chain.run(guard(0.9), velocity, [1.0, 1.0]))["ratio_mean"]
    assert torch.allclose(script_B, (noise * moved).mean(dims), atol=2e-5)
    assert ratio == pytest.approx(float(script_B.exp().mean()), abs=1e-5)


@pytest.mark.parametrize("step", STEPS)
def test_with_the_old_velocity_the_ratio_is_exactly_one(catalog: Catalog, step: int) -> None:
    chain = Chain(catalog, step)
    found = figures(chain.run(guard(), chain.v_old, [1.0, -2.0]))
    assert found["ratio_abs_minus_1"] == 0.0
    assert found["log_prob_mean_abs_diff"] == 0.0


def test_every_step_moves_the_velocity_alike(catalog: Catalog) -> None:
    """Slope of the loss at ratio 1: A e (1 + eta^2 / 2) / D, whatever sigma and the length of the step."""
    for step in STEPS:
        chain = Chain(catalog, step)
        leaf = chain.v_old.clone().requires_grad_()
        output = chain.run(guard(), leaf, [1.5, -0.5])
        (gradient,) = torch.autograd.grad(output.loss, leaf)
        advantage = torch.tensor([1.5, -0.5]).reshape(-1, 1, 1, 1, 1)
        expected = advantage * chain.noise * (1 + 0.7**2 / 2) / chain.noise[0].numel()
        assert torch.allclose(gradient, expected, rtol=1e-3, atol=2e-5)


def test_at_ratio_one_the_slope_is_that_of_the_log_prob_times_std_dev_t_over_root_dt() -> None:
    new = torch.tensor([-1.0], requires_grad=True)
    output = compute(guard(), batch([1.5], torch.tensor([-1.0])), scored(new))
    (gradient,) = torch.autograd.grad(output.loss, new)
    assert float(gradient) == pytest.approx(-1.5 * 0.8 / math.sqrt(0.25))


def test_a_step_along_the_gradient_raises_the_log_prob_of_what_was_good(catalog: Catalog) -> None:
    for advantage in (1.0, -1.0):
        chain = Chain(catalog, 2)
        leaf = chain.v_old.clone().requires_grad_()
        output = chain.run(guard(), leaf, [advantage, advantage])
        (gradient,) = torch.autograd.grad(output.loss, leaf)
        after_B = chain.backend.log_prob(chain.next, chain.step(chain.v_old - 0.1 * gradient))
        assert bool(((after_B - chain.old_B) * advantage > 0).all())


def test_normalised_log_ratios_are_centred_and_equally_wide_where_plain_ones_are_not(
    catalog: Catalog,
) -> None:
    """The mean moves alike at two noise levels: what the ratio says of it must not depend on the level."""
    generator = torch.Generator().manual_seed(0)
    moved, rows, size = 0.2, 4000, 8
    plain, normalised = [], []
    for std in (0.8, 0.1):
        noise = torch.randn(rows, size, generator=generator)
        log_ratio_B = (moved * noise / std - moved**2 / (2 * std**2)).mean(1)
        std_B, moved_B = torch.full((rows,), std), torch.full((rows,), moved**2)
        plain.append(log_ratio_B)
        normalised.append(normalised_ratio(log_ratio_B, [moved_B], [std_B]).log())
    assert float(plain[1].mean()) < -1.9
    assert float(plain[1].std() / plain[0].std()) == pytest.approx(8.0, rel=0.1)
    assert all(abs(float(values.mean())) < 0.004 for values in normalised)
    assert float(normalised[1].std() / normalised[0].std()) == pytest.approx(1.0, rel=0.1)


def test_advantages_are_clamped() -> None:
    pairs = batch([9.0, -9.0], torch.zeros(2))
    assert figures(compute(guard(adv_clip=2.0), pairs, scored(torch.zeros(2))))[
        "adv_abs_mean"
    ] == pytest.approx(2.0)


def test_the_share_of_clipped_pairs_counts_the_normalised_ratio() -> None:
    """A log-ratio of 0.3 is one of 0.12 at s = 0.4."""
    pairs, transition = batch([1.0], torch.zeros(1)), scored(torch.tensor([0.3]))
    assert figures(compute(guard(0.12), pairs, transition))["clipfrac"] == 1.0
    assert figures(compute(guard(0.13), pairs, transition))["clipfrac"] == 0.0


def test_kl_by_hand() -> None:
    mean = torch.tensor([[1.0, 3.0]], requires_grad=True)
    transition = scored(
        torch.zeros(1), 0.5, mean={VISUAL: mean}, reference={VISUAL: torch.tensor([[0.0, 1.0]])}
    )
    output = compute(guard(kl_beta=0.04), batch([0.0], torch.zeros(1)), transition)
    assert figures(output)["kl_loss"] == pytest.approx(2.5 / 0.5)
    assert float(output.loss.detach()) == pytest.approx(0.04 * 5.0)
    (gradient,) = torch.autograd.grad(output.loss, mean)
    assert gradient.tolist() == [pytest.approx([0.04 * 2.0, 0.04 * 4.0])]


def test_rows_of_weight_zero_leave_loss_gradient_and_metrics() -> None:
    new = torch.tensor([-1.1, -1.0], requires_grad=True)
    pairs = batch([4.0, 1.0], torch.tensor([math.nan, -1.0]), weights=[0.0, 1.0])
    output = compute(guard(), pairs, scored(new))
    (gradient,) = torch.autograd.grad(output.loss, new)
    assert gradient.tolist() == [0.0, pytest.approx(-0.4 / 0.25)]
    assert figures(output)["loss"] == pytest.approx(-4.0)
    assert float(output.metrics["loss"].count) == 1.0


def test_what_core_must_provide_is_refused_when_it_is_missing() -> None:
    pairs = batch([1.0], torch.zeros(1))
    with pytest.raises(ContractError, match="needs the scored transition"):
        compute(guard(), pairs, None)
    inputs, alone = ForwardInputs(streams={}), Predictions(trained={})
    with pytest.raises(ContractError, match="prediction of the old policy"):
        guard().compute(pairs, inputs, alone, scored(torch.zeros(1)))
    with pytest.raises(ContractError, match="one advantage per sample, got none"):
        guard().expand([make_sample(steps=2)], None, StepContext())
    with pytest.raises(BadInput, match=r"kl_beta is 0\.1.*ref_mode = \"lora_base\""):
        compute(guard(kl_beta=0.1), pairs, scored(torch.zeros(1)))


def test_a_reference_is_needed_only_with_a_kl_term() -> None:
    assert Need.REFERENCE not in guard().needs
    assert guard(kl_beta=0.1).needs == guard().needs | {Need.REFERENCE}


@pytest.mark.parametrize("bad", [0.0, -0.1, 1.0])
def test_clip_ranges_outside_zero_to_one_are_refused(bad: float) -> None:
    with pytest.raises(ValueError):
        GrpoGuardConfig(clip_range=bad)
