"""What losses on generated samples share: advantages, references, scored steps, weighted figures."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.api import (
    VISUAL,
    BadInput,
    Context,
    ContractError,
    ForwardInputs,
    LossOutput,
    Metric,
    Need,
    Pair,
    PairBatch,
    Predictions,
    Sample,
    ScoredTransition,
    StepContext,
    successor,
)
from drl.mathematics.objectives import (
    AdvantageLoss,
    RecordedLoss,
    clipped_policy_loss,
    new_and_old_log_prob,
)
from drl.testing import make_pair, make_sample
from drl.testing.contracts.loss_driver import batch_of

CONTEXT = StepContext()


class Plain(RecordedLoss):
    """Minus advantage times log-prob."""

    needs = frozenset({Need.ROLLOUT, Need.TRANSITION})

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        loss_B = -self.clamped_advantage(pairs) * self.scored(transition).joint_log_prob
        return LossOutput.weighted(loss_B, pairs.weight_B, {})


class Halves(Plain):
    """Two pairs per sample, numbered."""

    def pairs_of(self, sample: Sample, advantage: float, context: StepContext) -> list[Pair]:
        return [make_pair(id=(sample.index, n), values={"advantage": advantage}) for n in (0, 1)]


def plain(kl_beta: float = 0.0, adv_clip_max: float = 5.0, kind: type[Plain] = Plain) -> Plain:
    section = SimpleNamespace(kl_beta=kl_beta, adv_clip_max=adv_clip_max)
    return kind(None, Context(section=section))


def scored(log_prob: Any, **changes: Any) -> ScoredTransition:
    mean = torch.tensor([[1.0, 3.0]])
    made = ScoredTransition(
        mean={VISUAL: mean}, std_dev_t_B={VISUAL: torch.tensor([0.5])}, log_prob_B=log_prob
    )
    return replace(made, **changes)


def test_a_kl_term_asks_for_a_reference_of_this_instance_alone() -> None:
    assert plain(0.1).needs == Plain.needs | {Need.REFERENCE}
    assert plain().needs == Plain.needs
    assert Need.REFERENCE not in Plain.needs


def test_units_expand_sample_by_sample() -> None:
    samples = [make_sample(index=n) for n in (4, 9)]
    pairs = plain(kind=Halves).expand(samples, [1.0, -2.0], CONTEXT)
    assert [pair.id for pair in pairs] == [(4, 0), (4, 1), (9, 0), (9, 1)]
    assert [pair.values["advantage"] for pair in pairs] == [1.0, 1.0, -2.0, -2.0]


@pytest.mark.parametrize("kind", [Plain, Halves])
def test_every_sample_needs_an_advantage(kind: type[Plain]) -> None:
    samples = [make_sample(index=4, steps=2)]
    with pytest.raises(ContractError, match=f"{kind.__name__} needs one advantage per sample"):
        plain(kind=kind).expand(samples, None, CONTEXT)
    with pytest.raises(ValueError, match="zip"):
        plain(kind=kind).expand(samples, [1.0, 2.0], CONTEXT)


def test_a_sum_without_pairs_of_its_own_cannot_be_made() -> None:
    assert AdvantageLoss.__abstractmethods__ == {"pairs_of", "prepare", "compute"}


def test_recorded_steps_are_pairs_and_only_their_latents_are_fed() -> None:
    loss = plain()
    pairs = loss.expand([make_sample(index=4, steps=3, reward=1.0)], [0.5], CONTEXT)
    assert [pair.id for pair in pairs] == [(4, 0), (4, 1), (4, 2)]
    batch = batch_of(pairs)
    inputs = loss.prepare(batch, CONTEXT)
    assert list(inputs.streams) == [VISUAL]
    assert torch.equal(inputs.streams[VISUAL], batch.tensors[VISUAL])
    assert successor(VISUAL) in batch.tensors


def test_advantages_are_clamped_on_both_sides() -> None:
    batch = batch_of(
        [make_pair(id=(n,), values={"advantage": a}) for n, a in enumerate((9, -9, 1))]
    )
    assert plain(adv_clip_max=2.0).clamped_advantage(batch).tolist() == [2.0, -2.0, 1.0]


def test_streams_have_one_log_prob_together() -> None:
    both = {"visual": torch.tensor([-1.0, -2.0]), "audio": torch.tensor([-0.25, 0.5])}
    assert scored(both).joint_log_prob.tolist() == [-1.25, -1.5]
    one = {"visual": torch.tensor([-1.0])}
    assert scored(one).joint_log_prob is one["visual"], "nothing is copied for one stream"


def test_rows_of_weight_0_have_a_ratio_of_1_whatever_they_hold() -> None:
    values = [{"log_prob_old": old} for old in (-1.5, math.nan, math.inf)]
    pairs = [make_pair(id=(n,), values=v, weight=float(n == 0)) for n, v in enumerate(values)]
    new_B, old_B = new_and_old_log_prob(batch_of(pairs), scored({VISUAL: torch.full((3,), -1.0)}))
    assert (new_B - old_B).tolist() == [0.5, 0.0, 0.0]


def test_kl_by_hand() -> None:
    """mean((1 - 0)^2, (3 - 1)^2) / (2 x 0.25) = 5."""
    transition = scored(
        {VISUAL: torch.zeros(1)}, reference_mean={VISUAL: torch.tensor([[0.0, 1.0]])}
    )
    assert plain(0.1).gaussian_kl(transition).tolist() == [5.0]


def test_kl_says_what_it_lacks() -> None:
    transition = scored({VISUAL: torch.zeros(1)})
    with pytest.raises(BadInput, match=r'kl_beta is 0\.1.*ref_mode = "lora_base" or "ema"'):
        plain(0.1).gaussian_kl(transition)
    with pytest.raises(ContractError, match="Plain needs the scored transition"):
        plain().scored(None)
    assert plain(0.1).divides_by_noise
    assert not plain().divides_by_noise


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(1, 1.5, -1.2), (1, 0.5, -0.5), (-1, 1.5, 1.5), (-1, 0.5, 0.8)],
)
def test_the_clip_is_pessimistic(advantage: float, ratio: float, expected: float) -> None:
    found = clipped_policy_loss(torch.tensor([float(advantage)]), torch.tensor([ratio]), 0.2)
    assert found.tolist() == [pytest.approx(expected)]


def test_a_weighted_output_is_a_sum_with_weighted_means() -> None:
    loss_B = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    weight_B = torch.tensor([1.0, 3.0, 0.0])
    output = LossOutput.weighted(loss_B, weight_B, {"ratio": torch.tensor([4.0, 0.0, 100.0])})
    assert output.loss.item() == 7.0
    assert output.loss.requires_grad
    means = {name: float(m.total / m.count) for name, m in output.metrics.items()}
    assert means == {"loss": 7 / 4, "ratio": 1.0}
    assert not any(m.total.requires_grad or m.by_component for m in output.metrics.values())


def test_a_metric_of_no_weight_counts_nothing() -> None:
    metric = Metric.weighted(torch.tensor([3.0]), torch.tensor([0.0]), by_component=True)
    assert (float(metric.total), float(metric.count), metric.reduction) == (0.0, 0.0, "mean")
    assert metric.by_component
