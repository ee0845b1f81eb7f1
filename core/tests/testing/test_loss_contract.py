"""The loss contract fails on losses whose sums, weights, noise or signs are wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from contract_runs import Verdict, judged, offered, plugin_in
from torch import Tensor

from drl.api import (
    API_VERSION,
    Component,
    ForwardInputs,
    Loss,
    LossOutput,
    Metric,
    Need,
    Pair,
    PairBatch,
    Predictions,
    Sample,
    ScoredTransition,
    StepContext,
    hookimpl,
)
from drl.catalog import Catalog
from drl.mathematics.recorded import recorded_pairs
from drl.testing.contracts.loss import LossContract
from drl.types import VISUAL

DRL_API = API_VERSION
NEEDS = frozenset({Need.ROLLOUT, Need.OLD_LOG_PROB, Need.TRANSITION})


class Ratio(Loss):
    """An honest policy gradient without a clip: ``-A exp(new - old)``. The wrong ones change one thing."""

    needs = NEEDS

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        assert advantages is not None
        return [
            pair
            for sample, advantage in zip(unit, advantages, strict=True)
            for pair in recorded_pairs(sample, advantage, context.sigmas)
        ]

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        return ForwardInputs(streams={VISUAL: pairs.tensors[VISUAL]})

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        assert transition is not None
        log_prob_B = transition.log_prob_B[VISUAL]
        loss_B = self.rows(log_prob_B, pairs.values["log_prob_old"], pairs.values["advantage"])
        return self.output(loss_B, pairs.weight_B)

    def rows(self, log_prob_B: Tensor, old_B: Tensor, advantage_B: Tensor) -> Tensor:
        return -advantage_B * torch.exp(log_prob_B - old_B)

    def output(self, loss_B: Tensor, weight_B: Tensor) -> LossOutput:
        total = (weight_B * loss_B).sum()
        return LossOutput(
            loss=total, metrics={"loss": Metric(total=total.detach(), count=weight_B.sum())}
        )


class Averaging(Ratio):
    """Takes the mean of a micro-batch, so that its size is a hyper-parameter."""

    def output(self, loss_B: Tensor, weight_B: Tensor) -> LossOutput:
        total = (weight_B * loss_B).mean()
        return LossOutput(
            loss=total, metrics={"loss": Metric(total=total.detach(), count=weight_B.sum())}
        )


class Weightless(Ratio):
    """Counts filler rows like all others."""

    def output(self, loss_B: Tensor, weight_B: Tensor) -> LossOutput:
        return super().output(loss_B, torch.ones_like(weight_B))


class Loyal(Ratio):
    """Trains on samples that a filter removed."""

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        return [replace(pair, weight=1.0) for pair in super().expand(unit, advantages, context)]


class Merging(Ratio):
    """Names all steps of a sample alike."""

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        pairs = super().expand(unit, advantages, context)
        return [replace(pair, id=pair.id[:1]) for pair in pairs]


class Shuffling(Ratio):
    """Orders its pairs by dice, which fall alike in every run of the tests."""

    dice: ClassVar[random.Random] = random.Random(0)

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        pairs = super().expand(unit, advantages, context)
        self.dice.shuffle(pairs)
        return pairs


class Noisy(Ratio):
    """Draws noise from the process, in the order in which micro-batches come."""

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        latents = pairs.tensors[VISUAL]
        return ForwardInputs(streams={VISUAL: latents + 0.1 * torch.randn_like(latents)})


class Ranked(Ratio):
    """Draws the noise of a pair by rank: other ranks, other noise."""

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        latents = pairs.tensors[VISUAL]
        noise = torch.randn(latents.shape[1:], generator=context.generator("noise", context.rank))
        return ForwardInputs(streams={VISUAL: latents + noise})


class Greedy(Ratio):
    """Asks core for a pass that its component does not declare."""

    needs = NEEDS | {Need.OLD_PREDICTION}


class Talkative(Ratio):
    """Reports a figure only where there is something to report."""

    def output(self, loss_B: Tensor, weight_B: Tensor) -> LossOutput:
        made = super().output(loss_B, weight_B)
        rising = {"rising": made.metrics["loss"]} if float(made.loss) > 0 else {}
        return LossOutput(loss=made.loss, metrics={**made.metrics, **rising})


class Holding(Ratio):
    """Keeps the whole graph alive for the sake of a figure."""

    def output(self, loss_B: Tensor, weight_B: Tensor) -> LossOutput:
        total = (weight_B * loss_B).sum()
        return LossOutput(loss=total, metrics={"loss": Metric(total=total, count=weight_B.sum())})


class Adding(Ratio):
    """Reports sums where the log wants means."""

    def output(self, loss_B: Tensor, weight_B: Tensor) -> LossOutput:
        made = super().output(loss_B, weight_B)
        return LossOutput(
            loss=made.loss, metrics={"loss": replace(made.metrics["loss"], reduction="sum")}
        )


class Misreporting(Ratio):
    """Logs the absolute loss under the name of the loss."""

    def output(self, loss_B: Tensor, weight_B: Tensor) -> LossOutput:
        made = super().output(loss_B, weight_B)
        total = (weight_B * loss_B).abs().sum().detach()
        return LossOutput(
            loss=made.loss, metrics={"loss": Metric(total=total, count=weight_B.sum())}
        )


class Curious(Ratio):
    """Adds an entropy bonus, which moves the model without any advantage."""

    def rows(self, log_prob_B: Tensor, old_B: Tensor, advantage_B: Tensor) -> Tensor:
        return super().rows(log_prob_B, old_B, advantage_B) + 0.1 * log_prob_B


class Descending(Ratio):
    """Has the sign of the advantage wrong."""

    def rows(self, log_prob_B: Tensor, old_B: Tensor, advantage_B: Tensor) -> Tensor:
        return -super().rows(log_prob_B, old_B, advantage_B)


class Squaring(Ratio):
    """Counts the ratio twice, which at ratio 1 nobody sees in the loss."""

    def rows(self, log_prob_B: Tensor, old_B: Tensor, advantage_B: Tensor) -> Tensor:
        return -advantage_B * torch.exp(2 * (log_prob_B - old_B))


MICRO = "test_micro_batch_size_does_not_change_the_gradient"
REMOVED = "test_a_removed_sample_leaves_sum_and_divisor"
IDS = "test_pairs_have_unique_ids_in_a_fixed_order"
INPUTS = "test_inputs_depend_on_the_pair_and_on_nothing_else"
NAMES = "test_metric_names_are_the_same_in_every_micro_batch"
UNIT = "test_at_ratio_one_the_gradient_is_minus_advantage_times_that_of_the_log_prob"

CASES: list[tuple[type[Ratio], str, str]] = [
    (Averaging, MICRO, "allclose"),
    (Weightless, REMOVED, "allclose"),
    (Loyal, REMOVED, "At index 3 diff: 1.0 != 0.0"),
    (Merging, IDS, "len(first)"),
    (Shuffling, IDS, "pair.id for pair in first"),
    (Noisy, INPUTS, "torch.equal"),
    (Ranked, INPUTS, "torch.equal"),
    (Greedy, "test_needs_are_declared_as_they_are", "old_prediction"),
    (Talkative, NAMES, "other == names[0]"),
    (Holding, NAMES, "requires_grad"),
    (Adding, NAMES, "'sum'"),
    (Misreporting, "test_the_mean_metric_of_the_loss_is_the_loss", "±"),
    (Curious, "test_zero_advantage_gives_zero_policy_gradient", "== [0.0, 0.0]"),
    (Curious, UNIT, "allclose"),
    (Squaring, UNIT, "expected"),
    (Descending, "test_one_step_moves_the_log_prob_the_way_of_the_advantage", "is True"),
]


@hookimpl
def drl_register_losses() -> list[Component]:
    facts = {"needs": tuple(sorted(NEEDS))}
    return offered([Ratio, *[case[0] for case in CASES]], facts=facts)


class Checks(LossContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("loss", "ratio")

    @pytest.fixture
    def catalog(self) -> Catalog:
        return plugin_in(__name__)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    cases = [(wrong, check) for wrong, check, _ in CASES]
    return judged(Checks, tmp_path_factory.mktemp("checks"), cases, honest=Ratio)


def test_an_honest_loss_passes_every_check(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["Ratio"]
    assert (found.failed, found.skipped) == ({}, {})
    assert {case[1] for case in CASES} <= found.passed


@pytest.mark.parametrize(("wrong", "check", "said"), CASES)
def test_a_wrong_loss_is_caught(
    verdicts: dict[str, Verdict], wrong: type[Ratio], check: str, said: str
) -> None:
    assert said in verdicts[wrong.__name__].failed[check]
