"""``LossContract``: what every loss keeps, tried on a model of two parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.catalog import Catalog
from drl.interfaces.loss import Loss
from drl.testing.contracts.base import ContractBase
from drl.testing.contracts.loss_driver import (
    batch_of,
    log_prob_and_slope,
    on_policy,
    run_batch,
    run_window,
)
from drl.types import VISUAL, Need, Pair, Sample, StepContext

PARAMETERS = torch.tensor([0.3, -0.2])


class LossContract(ContractBase):
    """Sums over rows with their weights, noise by pair, the same gradient however a window is cut.

    Losses that need the scored transition are held to the policy gradient too. Fixtures to override:
    ``section`` (``kl_beta``, ``adv_clip_max`` of ``[algorithm]``), ``samples``.
    """

    @pytest.fixture
    def section(self) -> Any:
        """No KL term; advantages within ± 5."""
        return SimpleNamespace(kl_beta=0.0, adv_clip_max=5.0, ref_mode=None)

    @pytest.fixture
    def step_context(self, section: Any) -> StepContext:
        """The first window of rollout 0, seed 0."""
        return StepContext(section=section)

    @pytest.fixture
    def samples(self, make_sample: Callable[..., Sample]) -> list[Sample]:
        """Four samples with trajectories of three steps, clean latents and rewards."""
        made = [make_sample(index=10 + i, member=i, seed=i, steps=3) for i in range(4)]
        for sample in made:
            generator = torch.Generator().manual_seed(sample.index)
            sample.clean = {VISUAL: torch.randn(4, 1, 4, 4, generator=generator)}
            sample.reward = 0.25 * sample.member
        return made

    @pytest.fixture
    def pairs(self, instance: Loss, samples: list[Sample], step_context: StepContext) -> list[Pair]:
        """The pairs of the samples with advantages 1.5, -0.7, 0.4 and -1.2, made by old parameters."""
        pairs = expanded(instance, samples, [1.5, -0.7, 0.4, -1.2], step_context)
        return on_policy(pairs, PARAMETERS) if is_policy(instance) else pairs

    def test_needs_are_declared_as_they_are(self, catalog: Catalog, instance: Loss) -> None:
        declared = {Need(need) for need in catalog.find(*self.component).component.facts["needs"]}
        assert declared <= instance.needs <= declared | {Need.REFERENCE}

    def test_pairs_have_unique_ids_in_a_fixed_order(
        self, instance: Loss, samples: list[Sample], step_context: StepContext
    ) -> None:
        first, second = (expanded(instance, samples, [0.5] * 4, step_context) for _ in range(2))
        assert [pair.id for pair in first] == [pair.id for pair in second]
        assert len({pair.id for pair in first}) == len(first) > 0
        assert [pair.sigma for pair in first] == [pair.sigma for pair in second]

    def test_inputs_depend_on_the_pair_and_on_nothing_else(
        self, instance: Loss, pairs: list[Pair], step_context: StepContext
    ) -> None:
        together = instance.prepare(batch_of(pairs), step_context)
        for place, pair in enumerate(pairs):
            alone = instance.prepare(batch_of([pair]), replace(step_context, rank=1, world=2))
            for name, tensor in (*alone.streams.items(), *alone.extras.items()):
                whole = {**together.streams, **together.extras}[name]
                assert torch.equal(tensor[0], whole[place])
            for name, tensor in alone.streams.items():
                rows = together.streams[name][place :: len(pairs)]
                assert len(rows) == alone.rows_per_pair == instance.rows_per_pair
                assert torch.equal(tensor, rows)

    @pytest.mark.parametrize("rows", [1, 2, 3])
    def test_micro_batch_size_does_not_change_the_gradient(
        self, instance: Loss, pairs: list[Pair], step_context: StepContext, rows: int
    ) -> None:
        whole = run_window(instance, pairs, PARAMETERS, step_context, len(pairs))
        cut = run_window(instance, pairs, PARAMETERS, step_context, rows)
        assert torch.allclose(cut.gradient, whole.gradient, rtol=1e-4, atol=1e-6)
        assert cut.loss == pytest.approx(whole.loss, rel=1e-4, abs=1e-6)

    def test_a_removed_sample_leaves_sum_and_divisor(
        self, instance: Loss, samples: list[Sample], pairs: list[Pair], step_context: StepContext
    ) -> None:
        gone = samples[1].index
        kept = [pair for pair in pairs if pair.unit != gone]
        masked = [replace(pair, weight=0.0) if pair.unit == gone else pair for pair in pairs]
        with_filler = run_window(instance, masked, PARAMETERS, step_context, 2)
        without = run_window(instance, kept, PARAMETERS, step_context, 2)
        assert with_filler.weight == without.weight
        assert torch.allclose(with_filler.gradient, without.gradient, rtol=1e-4, atol=1e-6)
        samples[1].removed = True
        weights = [pair.weight for pair in expanded(instance, samples, [1.0] * 4, step_context)]
        assert weights == [pair.weight for pair in masked]

    def test_metric_names_are_the_same_in_every_micro_batch(
        self, instance: Loss, pairs: list[Pair], step_context: StepContext
    ) -> None:
        cut = run_window(instance, pairs, PARAMETERS, step_context, 1)
        names = [list(output.metrics) for output in cut.outputs]
        assert "loss" in names[0]
        assert all(other == names[0] for other in names)
        metrics = [metric for output in cut.outputs for metric in output.metrics.values()]
        assert all(torch.isfinite(metric.total) and metric.count >= 0 for metric in metrics)
        assert not any(metric.total.requires_grad for metric in metrics)
        assert {metric.reduction for metric in metrics} <= {"mean", "max"}

    def test_the_mean_metric_of_the_loss_is_the_loss(
        self, instance: Loss, pairs: list[Pair], step_context: StepContext
    ) -> None:
        cut = run_window(instance, pairs, PARAMETERS, step_context, 2)
        metrics = [output.metrics["loss"] for output in cut.outputs]
        total = sum(float(metric.total) for metric in metrics)
        count = sum(float(metric.count) for metric in metrics)
        assert total / count == pytest.approx(cut.loss, rel=1e-5, abs=1e-7)

    def test_zero_advantage_gives_zero_policy_gradient(
        self, instance: Loss, samples: list[Sample], step_context: StepContext
    ) -> None:
        require_policy(instance)
        pairs = expanded(instance, samples, [0.0] * 4, step_context)
        outcome = run_window(instance, on_policy(pairs, PARAMETERS), PARAMETERS, step_context, 3)
        assert outcome.gradient.tolist() == [0.0, 0.0]

    def test_at_ratio_one_the_gradient_is_minus_advantage_times_that_of_the_log_prob(
        self, instance: Loss, pairs: list[Pair], step_context: StepContext
    ) -> None:
        require_policy(instance)
        for pair in pairs:
            leaf = PARAMETERS.clone().requires_grad_()
            loss = run_batch(instance, [pair], leaf, step_context).loss
            (gradient,) = torch.autograd.grad(loss, leaf)
            slope = log_prob_and_slope(pair, PARAMETERS)[1]
            expected = -pair.values["advantage"] * slope
            assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize(("advantage", "rises"), [(1.0, True), (-1.0, False)])
    def test_one_step_moves_the_log_prob_the_way_of_the_advantage(
        self,
        instance: Loss,
        samples: list[Sample],
        step_context: StepContext,
        *,
        advantage: float,
        rises: bool,
    ) -> None:
        require_policy(instance)
        pair = expanded(instance, samples[:1], [advantage], step_context)[0]
        (pair,) = on_policy([pair], PARAMETERS)
        outcome = run_window(instance, [pair], PARAMETERS, step_context, 1)
        before, _ = log_prob_and_slope(pair, PARAMETERS)
        after, _ = log_prob_and_slope(pair, PARAMETERS - 1e-3 * outcome.gradient)
        assert (after > before) is rises


def expanded(
    loss: Loss, samples: Sequence[Sample], advantages: Sequence[float], context: StepContext
) -> list[Pair]:
    """Expand samples as core does: unit by unit, advantages only for losses with a rollout."""
    has_rollout = Need.ROLLOUT in loss.needs
    return [
        pair
        for sample, advantage in zip(samples, advantages, strict=True)
        for pair in loss.expand([sample], [advantage] if has_rollout else None, context)
    ]


def is_policy(loss: Loss) -> bool:
    """True when the loss scores recorded steps against an old log-probability."""
    return Need.TRANSITION in loss.needs and Need.OLD_LOG_PROB in loss.needs


def require_policy(loss: Loss) -> None:
    """Skip the running test for losses without a policy gradient."""
    if not is_policy(loss):
        pytest.skip(f"{type(loss).__name__} needs no scored transition and no old log-prob")
