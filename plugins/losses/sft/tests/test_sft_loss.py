"""Supervised flow matching: draws by pair, formulas by hand, metrics by sigma."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.api import (
    VISUAL,
    Context,
    ContractError,
    ForwardInputs,
    Pair,
    PairBatch,
    Predictions,
    Sample,
    StepContext,
)
from drl.mathematics.noising import logit_normal_level, target_of
from drl.testing.builders import make_sample
from drl.testing.contracts.loss_driver import batch_of
from drl_loss_sft.config import SftLossConfig
from drl_loss_sft.loss import SftLoss, by_sigma
from drl_loss_sft.sigmas import draw_from_grid, shifted_grid

CONTEXT = StepContext(seed=5, section=SimpleNamespace(kl_beta=0.0, adv_clip_max=5.0))


def sft(**options: Any) -> SftLoss:
    return SftLoss(SftLossConfig(**options), Context(section=CONTEXT.section))


def record(index: int = 3) -> Sample:
    sample = make_sample(index=index)
    sample.clean = {VISUAL: torch.arange(8.0).reshape(2, 1, 2, 2)}
    return sample


def expand(loss: SftLoss, count: int, context: StepContext = CONTEXT) -> list[Pair]:
    return [pair for index in range(count) for pair in loss.expand([record(index)], None, context)]


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
def test_the_grid_by_hand(shift: float) -> None:
    grid = shifted_grid(shift)
    assert grid.shape == (1000,)
    assert float(grid[0]) == 1.0
    middle = 0.5
    assert float(grid[500]) == pytest.approx(shift * middle / (1 + (shift - 1) * middle))
    assert float(grid[-1]) == pytest.approx(shift * 0.001 / (1 + (shift - 1) * 0.001))
    assert bool((grid.diff() < 0).all())


def test_grid_draws_are_points_of_the_grid_and_even_over_it() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [draw_from_grid(3.0, generator) for _ in range(4000)]
    assert set(drawn) <= set(shifted_grid(3.0).tolist())
    assert sum(sigma > 0.75 for sigma in drawn) / 4000 == pytest.approx(0.5, abs=0.03)


def test_logit_normal_draws_have_their_median_at_one_half() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor([logit_normal_level(generator) for _ in range(4000)])
    assert float(drawn.median()) == pytest.approx(0.5, abs=0.02)
    assert float(torch.logit(drawn).std()) == pytest.approx(1.0, abs=0.04)
    assert bool(((drawn > 0) & (drawn < 1)).all())


def test_a_pair_is_a_clean_latent_with_a_sigma_and_no_timestep() -> None:
    (pair,) = sft().expand([record()], None, CONTEXT)
    assert (pair.id, pair.unit, pair.timestep, pair.weight) == ((3,), 3, None, 1.0)
    assert 0 < pair.sigma <= 1
    assert list(pair.tensors) == [VISUAL]
    assert pair.negative is None


def test_sigma_and_noise_depend_on_seed_and_sample_not_on_rank_or_batch() -> None:
    loss = sft()
    pairs = expand(loss, 6)
    together = loss.prepare(batch_of(pairs), CONTEXT).streams[VISUAL]
    for rank, pair in enumerate(pairs):
        other = StepContext(seed=5, rank=rank, world=6, window=rank, section=CONTEXT.section)
        assert expand(loss, 6, other)[rank].sigma == pair.sigma
        alone = loss.prepare(batch_of([pair]), other).streams[VISUAL]
        assert torch.equal(alone[0], together[rank])
    assert len({pair.sigma for pair in pairs}) == 6
    reseeded = expand(loss, 6, StepContext(seed=6, section=CONTEXT.section))
    assert [pair.sigma for pair in reseeded] != [pair.sigma for pair in pairs]


def test_noised_latents_and_target_fit_each_other() -> None:
    loss = sft()
    pairs = batch_of(expand(loss, 4))
    inputs = loss.prepare(pairs, CONTEXT)
    clean, noised = pairs.tensors[VISUAL], inputs.streams[VISUAL]
    target = inputs.extras[target_of(VISUAL)]
    sigma = pairs.sigma_B.reshape(-1, 1, 1, 1, 1)
    assert torch.allclose(noised, clean + sigma * target, atol=1e-5)
    noise = target + clean
    assert abs(float(noise.mean())) < 0.6
    assert float(noise.std()) == pytest.approx(1.0, abs=0.4)


def test_a_perfect_prediction_has_no_loss_and_an_error_counts_squared() -> None:
    loss = sft()
    pairs = batch_of(expand(loss, 2))
    inputs = loss.prepare(pairs, CONTEXT)
    target = inputs.extras[target_of(VISUAL)]
    exact = loss.compute(pairs, inputs, Predictions(trained={VISUAL: target}), None)
    off = loss.compute(pairs, inputs, Predictions(trained={VISUAL: target + 2.0}), None)
    assert float(exact.loss) == 0.0
    assert float(off.loss) == pytest.approx(8.0, rel=1e-5)
    assert float(off.metrics["loss"].total / off.metrics["loss"].count) == pytest.approx(4.0)


def test_the_gradient_by_hand() -> None:
    pairs, target = batch_of(expand(sft(), 1)), torch.tensor([[1.0, 3.0]])
    predicted = torch.tensor([[2.0, 0.0]], requires_grad=True)
    inputs = ForwardInputs(streams={}, extras={target_of(VISUAL): target})
    output = sft().compute(pairs, inputs, Predictions(trained={VISUAL: predicted}), None)
    (gradient,) = torch.autograd.grad(output.loss, predicted)
    assert gradient.tolist() == [[1.0, -3.0]]


def test_a_half_precision_prediction_is_compared_in_float32() -> None:
    pairs, target = batch_of(expand(sft(), 1)), torch.full((1, 2), 1.001)
    inputs = ForwardInputs(streams={}, extras={target_of(VISUAL): target})
    predicted = {VISUAL: torch.ones(1, 2, dtype=torch.bfloat16)}
    output = sft().compute(pairs, inputs, Predictions(trained=predicted), None)
    assert float(output.loss) == pytest.approx(1e-6, rel=1e-3)


def test_buckets_hold_the_loss_of_their_range_and_are_all_there() -> None:
    metrics = by_sigma(
        torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.05, 0.49, 1.0]), torch.ones(3), 2
    )
    assert list(metrics) == ["loss_sigma_0.0_0.5", "loss_sigma_0.5_1.0"]
    assert [float(metric.total) for metric in metrics.values()] == [3.0, 4.0]
    assert [float(metric.count) for metric in metrics.values()] == [2.0, 1.0]
    assert by_sigma(torch.ones(1), torch.ones(1), torch.ones(1), 0) == {}
    assert (
        next(iter(by_sigma(torch.ones(1), torch.ones(1), torch.ones(1), 10)))
        == "loss_sigma_0.0_0.1"
    )


def test_removed_samples_weigh_nothing() -> None:
    sample = record()
    sample.removed = True
    assert sft().expand([sample], None, CONTEXT)[0].weight == 0.0


def test_mean_over_weights_is_that_of_all_items() -> None:
    """100 items of loss 2.0 and 900 of 0.5 are 0.65, however they are split."""
    loss, total, weight = sft(), 0.0, 0.0
    for count, error in ((100, math.sqrt(2.0)), (900, math.sqrt(0.5))):
        pairs = PairBatch(
            pairs=(),
            tensors={},
            values={},
            weight_B=torch.ones(count),
            sigma_B=torch.full((count,), 0.5),
            timestep_B=None,
        )
        inputs = ForwardInputs(streams={}, extras={target_of(VISUAL): torch.zeros(count, 1)})
        predicted = {VISUAL: torch.full((count, 1), error)}
        total += float(loss.compute(pairs, inputs, Predictions(trained=predicted), None).loss)
        weight += count
    assert total / weight == pytest.approx(0.65, rel=1e-5)


@pytest.mark.parametrize(
    ("record_name", "words"), [("clean", "clean latents"), ("condition", "its condition")]
)
def test_a_missing_record_is_named(record_name: str, words: str) -> None:
    sample = record()
    setattr(sample, record_name, None)
    with pytest.raises(ContractError, match=f"sample 3 lacks {words}"):
        sft().expand([sample], None, CONTEXT)


def test_it_needs_no_rollout() -> None:
    assert sft().unit == "record"
    assert sft().needs == frozenset()


@pytest.mark.parametrize(
    "bad", [{"sigma": "uniform"}, {"flow_shift": 0.0}, {"sigma_buckets": -1}, {"shift": 3.0}]
)
def test_unknown_and_impossible_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SftLossConfig(**bad)


def test_the_option_says_where_noise_levels_are_drawn() -> None:
    on_grid = [pair.sigma for pair in expand(sft(sigma="grid", flow_shift=3.0), 40)]
    assert set(on_grid) <= set(shifted_grid(3.0).tolist())
    normal = [pair.sigma for pair in expand(sft(sigma="logit_normal"), 40)]
    assert not set(normal) & set(shifted_grid(1.0).tolist())
    generator = CONTEXT.generator("sft_sigma", 7)
    assert normal[4] != normal[7] == logit_normal_level(generator)
    assert on_grid[7] == draw_from_grid(3.0, CONTEXT.generator("sft_sigma", 7))


def test_a_pair_keeps_what_its_sample_was_conditioned_on_and_no_negative() -> None:
    sample = record(4)
    (pair,) = sft().expand([sample], None, CONTEXT)
    assert pair.condition is sample.condition
    assert (pair.negative, pair.unit, pair.id) == (None, 4, (4,))


def test_several_samples_of_a_unit_make_their_pairs_in_order() -> None:
    pairs = sft().expand([record(9), record(2)], None, CONTEXT)
    assert [pair.id for pair in pairs] == [(9,), (2,)]


def test_streams_are_noised_apart_and_their_losses_added() -> None:
    sample = record()
    sample.clean = {"visual": torch.zeros(2, 1, 2, 2), "sound": torch.ones(4)}
    loss = sft()
    batch = batch_of(loss.expand([sample], None, CONTEXT))
    inputs = loss.prepare(batch, CONTEXT)
    assert set(inputs.extras) == {target_of("visual"), target_of("sound")}
    sigma = float(batch.sigma_B[0])
    for name, clean in sample.clean.items():
        noise = inputs.extras[target_of(name)][0] + clean
        expected = (1 - sigma) * clean + sigma * noise
        assert torch.allclose(inputs.streams[name][0], expected, atol=1e-6)
    off_by = {
        "visual": inputs.extras[target_of("visual")] + 2.0,
        "sound": inputs.extras[target_of("sound")] - 3.0,
    }
    output = loss.compute(batch, inputs, Predictions(trained=off_by), None)
    assert float(output.loss) == pytest.approx(4.0 + 9.0, rel=1e-5)


@pytest.mark.parametrize(
    ("buckets", "names"),
    [
        (0, ["loss"]),
        (1, ["loss", "loss_sigma_0.0_1.0"]),
        (2, ["loss", "loss_sigma_0.0_0.5", "loss_sigma_0.5_1.0"]),
    ],
)
def test_figures_by_sigma_are_as_many_as_the_option_says(buckets: int, names: list[str]) -> None:
    loss = sft(sigma_buckets=buckets)
    batch = batch_of(expand(loss, 3))
    inputs = loss.prepare(batch, CONTEXT)
    wrong = {VISUAL: inputs.extras[target_of(VISUAL)] + 1.0}
    metrics = loss.compute(batch, inputs, Predictions(trained=wrong), None).metrics
    assert list(metrics) == names
    counts = [float(metrics[name].count) for name in names[1:]]
    assert sum(counts) == (3.0 if buckets else 0.0)
    for name in names[1:]:
        assert float(metrics[name].total) == pytest.approx(float(metrics[name].count), rel=1e-4)


def test_a_sigma_on_an_edge_belongs_above_it_and_one_to_the_last_range() -> None:
    sigma_B = torch.tensor([0.0, 0.25, 0.4999, 0.5, 0.75, 1.0])
    found = by_sigma(torch.ones(6), sigma_B, torch.ones(6), 4)
    assert [float(metric.count) for metric in found.values()] == [1.0, 2.0, 1.0, 2.0]
