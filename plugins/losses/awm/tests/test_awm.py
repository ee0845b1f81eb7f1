"""Advantage weighted matching: levels, numbers by hand, and that it is a policy gradient."""

from __future__ import annotations

import math
from dataclasses import replace
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
    Sample,
    StepContext,
    Streams,
)
from drl.mathematics.noising import squared_distance, target_of
from drl.testing import make_sample
from drl.testing.contracts.loss_driver import batch_of
from drl_loss_awm.config import AwmConfig
from drl_loss_awm.levels import logit_normal, step_numbers
from drl_loss_awm.loss import Awm

CONTEXT = StepContext(seed=5)


def awm(kl_beta: float = 0.0, adv_clip: float = 5.0, **options: Any) -> Awm:
    section = SimpleNamespace(kl_beta=kl_beta, adv_clip_max=adv_clip, ref_mode=None)
    return Awm(AwmConfig(**options), Context(section=section))


def rolled_out(index: int = 3, group: int = 0, steps: int = 4) -> Sample:
    return make_sample(index=index, group_index=group, seed=index, steps=steps, reward=1.0)


def rows(advantages: list[float], weights: list[float] | None = None) -> PairBatch:
    count = len(advantages)
    return PairBatch(
        pairs=tuple(Pair(id=(3, i), unit=3, sigma=0.5, tensors={}) for i in range(count)),
        tensors={},
        values={"advantage": torch.tensor(advantages)},
        weight_B=torch.tensor(weights or [1.0] * count),
        sigma_B=torch.full((count,), 0.5),
        timestep_B=None,
    )


def compute(
    loss: Awm, pairs: PairBatch, predicted: Tensor, target: Tensor, reference: Tensor | None = None
) -> LossOutput:
    inputs = ForwardInputs(streams={}, extras={target_of(VISUAL): target})
    other: Streams | None = None if reference is None else {VISUAL: reference}
    predictions = Predictions(trained={VISUAL: predicted}, reference=other)
    return loss.compute(pairs, inputs, predictions, None)


def figures(output: LossOutput) -> dict[str, float]:
    return {name: float(m.total / m.count) for name, m in output.metrics.items()}


def test_step_numbers_take_one_of_each_stretch() -> None:
    generator = torch.Generator().manual_seed(0)
    seen: list[set[int]] = [set(), set(), set()]
    for _ in range(200):
        for place, number in enumerate(step_numbers(9, 3, generator)):
            seen[place].add(number)
    assert seen == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}]


@pytest.mark.parametrize(
    ("limit", "count", "expected"),
    [(4, 4, [0, 1, 2, 3]), (1, 3, [0, 0, 0]), (2, 4, [0, 0, 1, 1]), (1, 1, [0])],
)
def test_step_numbers_where_nothing_is_left_to_chance(
    limit: int, count: int, expected: list[int]
) -> None:
    assert step_numbers(limit, count, torch.Generator().manual_seed(1)) == expected


def test_logit_normal_levels_are_stratified_shifted_and_never_nearly_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([logit_normal(4, 1.0, generator) for _ in range(2000)])
    assert bool((drawn.diff(dim=1) > 0).all())
    quartiles = torch.special.ndtri(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).sigmoid()
    for place, bound in enumerate(quartiles.tolist()):
        assert float(drawn[:, place].max()) <= bound <= float(drawn[:, place + 1].min())
    middle = logit_normal(2001, 3.0, torch.Generator().manual_seed(0))[1000]
    assert float(middle) == pytest.approx(0.75, abs=0.002)
    assert float(logit_normal(100_000, 1e-3, torch.Generator().manual_seed(0)).min()) == 0.01


def test_pairs_are_the_final_latents_at_the_rollouts_own_steps() -> None:
    sample = rolled_out(steps=4)
    assert sample.trajectory is not None
    pairs = awm(step_share=0.5, timestep_fraction=1.0).expand([sample], [0.7], CONTEXT)
    assert [pair.id for pair in pairs] == [(3, 0), (3, 1)]
    final = sample.trajectory.latents[VISUAL][-1]
    for pair, choices in zip(pairs, ([1.0, 0.75], [0.5, 0.25]), strict=True):
        assert pair.sigma in choices
        assert pair.timestep == 1000 * pair.sigma
        assert (pair.unit, pair.weight, dict(pair.values)) == (3, 1.0, {"advantage": 0.7})
        assert torch.equal(pair.tensors[VISUAL], final)
        assert pair.condition is sample.condition
        assert pair.negative is None


@pytest.mark.parametrize(("share", "count"), [(1.0, 10), (0.5, 5), (0.25, 2), (0.01, 1)])
def test_the_share_of_steps_is_the_number_of_pairs(share: float, count: int) -> None:
    for sigma in ("rollout", "logit_normal"):
        loss = awm(step_share=share, sigma=sigma)
        assert len(loss.expand([rolled_out(steps=10)], [1.0], CONTEXT)) == count


def test_the_last_steps_are_left_out_unless_asked_for() -> None:
    most = awm(step_share=1.0).expand([rolled_out(steps=10)], [1.0], CONTEXT)
    every = awm(step_share=1.0, timestep_fraction=1.0).expand(
        [rolled_out(steps=10)], [1.0], CONTEXT
    )
    assert min(pair.sigma for pair in most) == pytest.approx(0.2)
    assert min(pair.sigma for pair in every) == pytest.approx(0.1)


def test_members_of_a_group_share_levels_and_nobody_shares_noise() -> None:
    loss = awm(sigma="logit_normal")
    groups = [rolled_out(index, group=index // 2) for index in range(4)]
    levels = [[p.sigma for p in loss.expand([sample], [1.0], CONTEXT)] for sample in groups]
    assert levels[0] == levels[1] != levels[2] == levels[3]
    pairs = [pair for sample in groups for pair in loss.expand([sample], [1.0], CONTEXT)]
    batch = batch_of(pairs)
    inputs = loss.prepare(batch, CONTEXT)
    noise = inputs.extras[target_of(VISUAL)] + batch.tensors[VISUAL]
    assert len({tuple(row.flatten().tolist()) for row in noise}) == len(pairs)
    again = loss.prepare(batch, replace(CONTEXT, seed=6)).extras[target_of(VISUAL)]
    assert not torch.equal(again, inputs.extras[target_of(VISUAL)])


def test_noised_latents_and_target_fit_each_other() -> None:
    loss = awm()
    batch = batch_of(loss.expand([rolled_out()], [1.0], CONTEXT))
    inputs = loss.prepare(batch, CONTEXT)
    sigma = batch.sigma_B.reshape(-1, 1, 1, 1, 1)
    expected = batch.tensors[VISUAL] + sigma * inputs.extras[target_of(VISUAL)]
    assert torch.allclose(inputs.streams[VISUAL], expected, atol=1e-5)


def test_removed_and_failed_samples_weigh_nothing_even_with_a_broken_advantage() -> None:
    removed, failed = rolled_out(0), rolled_out(1)
    removed.removed, failed.reward = True, None
    pairs = awm().expand([removed, failed], [math.nan, math.nan], CONTEXT)
    assert {(pair.weight, pair.values["advantage"]) for pair in pairs} == {(0.0, 0.0)}


def test_the_loss_by_hand() -> None:
    """Errors (1 + 9) / 2 = 5 and (4 + 0) / 2 = 2, advantages 1.5 and -1."""
    predicted = torch.tensor([[1.0, 3.0], [2.0, 0.0]], requires_grad=True)
    output = compute(awm(), rows([1.5, -1.0]), predicted, torch.zeros(2, 2))
    assert float(output.loss.detach()) == pytest.approx(7.5 - 2.0)
    assert figures(output) == pytest.approx(
        {"policy_loss": 2.75, "matching_loss": 3.5, "loss": 2.75, "adv_abs_mean": 1.25}
    )
    (gradient,) = torch.autograd.grad(output.loss, predicted)
    assert gradient.tolist() == [[1.5, 4.5], [-2.0, 0.0]]


def test_the_gradient_is_that_of_the_papers_ratio_at_one() -> None:
    """Of ``-A exp(log p - log p_old)`` with ``log p = -error`` and samples of the present weights."""
    target = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    predicted = torch.zeros(3, 4, requires_grad=True)
    advantages = [1.5, -0.5, 0.25]
    output = compute(awm(), rows(advantages), predicted, target)
    (ours,) = torch.autograd.grad(output.loss, predicted)
    log_prob_B = -((predicted - target) ** 2).mean(1)
    ratio_B = torch.exp(log_prob_B - log_prob_B.detach())
    (theirs,) = torch.autograd.grad(-(torch.tensor(advantages) * ratio_B).sum(), predicted)
    assert torch.allclose(ours, theirs)


def test_it_pulls_the_model_towards_the_samples_of_higher_reward() -> None:
    """A toy whose best velocity at sigma 1 is ``noise - m``: descent must raise m, the mean of x0.

    The expected gradient at m is ``2 (E[A m] - E[A x0]) = -2 Cov(A, x0)``, with A = x0 and unit variance -2.
    """
    generator = torch.Generator().manual_seed(0)
    clean, noise = (torch.randn(20_000, 1, generator=generator) for _ in range(2))
    mean = torch.zeros((), requires_grad=True)
    loss = awm(adv_clip=100.0)
    pairs = rows([0.0])
    pairs = replace(
        pairs, values={"advantage": clean[:, 0]}, weight_B=torch.full((20_000,), 1 / 20_000)
    )
    inputs = ForwardInputs(streams={}, extras={target_of(VISUAL): noise - clean})
    predictions = Predictions(trained={VISUAL: noise - mean})
    (gradient,) = torch.autograd.grad(loss.compute(pairs, inputs, predictions, None).loss, mean)
    assert float(gradient) == pytest.approx(-2.0, abs=0.08)


def test_advantages_are_clamped() -> None:
    output = compute(awm(adv_clip=2.0), rows([9.0, -9.0]), torch.ones(2, 2), torch.zeros(2, 2))
    assert figures(output)["adv_abs_mean"] == 2.0
    assert float(output.loss) == 0.0


def test_kl_is_the_squared_distance_to_the_reference() -> None:
    predicted = torch.tensor([[1.0, 3.0]], requires_grad=True)
    reference = torch.tensor([[0.0, 1.0]], requires_grad=True)
    output = compute(awm(0.5), rows([0.0]), predicted, torch.zeros(1, 2), reference)
    assert figures(output)["kl_loss"] == pytest.approx(2.5)
    assert float(output.loss.detach()) == pytest.approx(1.25)
    to_model, to_other = torch.autograd.grad(output.loss, (predicted, reference), allow_unused=True)
    assert to_model.tolist() == [[0.5, 1.0]]
    assert to_other is None


def test_weights_multiply_the_loss_and_enter_the_mean() -> None:
    pairs = rows([1.0, 1.0], [3.0, 0.0])
    output = compute(awm(), pairs, torch.tensor([[2.0], [7.0]]), torch.zeros(2, 1))
    assert float(output.loss) == 12.0
    assert figures(output)["loss"] == 4.0


def test_streams_are_summed() -> None:
    one = {"visual": torch.ones(1, 2), "audio": torch.full((1, 3), 2.0)}
    other = {"visual": torch.zeros(1, 2), "audio": torch.zeros(1, 3)}
    assert squared_distance(one, other).tolist() == [5.0]


def test_a_reference_is_needed_only_with_a_kl_term() -> None:
    assert awm().needs == {Need.ROLLOUT}
    assert awm(0.1).needs == {Need.ROLLOUT, Need.REFERENCE}
    with pytest.raises(BadInput, match=r"kl_beta is 0\.1.*ref_mode = \"lora_base\""):
        compute(awm(0.1), rows([1.0]), torch.ones(1, 2), torch.ones(1, 2))


def test_what_the_engine_kept_back_is_named() -> None:
    bare, unconditioned, cut = make_sample(index=8), rolled_out(9), rolled_out(10)
    unconditioned.condition = None
    assert cut.trajectory is not None
    cut.trajectory = replace(
        cut.trajectory,
        latents={VISUAL: cut.trajectory.latents[VISUAL][:3]},
        latent_steps=(0, 1, 2),
    )
    for sample, words in (
        (bare, "sample 8 lacks its trajectory"),
        (unconditioned, "sample 9 lacks its condition"),
        (cut, r"sample 10 lacks its final latents, number 4.*ode_and_return_last"),
    ):
        with pytest.raises(ContractError, match=words):
            awm().expand([sample], [1.0], CONTEXT)
    with pytest.raises(ContractError, match="one advantage per sample, got none"):
        awm().expand([rolled_out()], None, CONTEXT)


@pytest.mark.parametrize(
    "bad", [{"step_share": 0.0}, {"step_share": 1.1}, {"flow_shift": 0.0}, {"sigma": "uniform"}]
)
def test_options_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        AwmConfig(**bad)
