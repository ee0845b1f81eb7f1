"""Accumulation, clipping and what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drl.errors import ContractError
from drl.stages.step import Totals, clip_gradients, mean_of
from drl.types import LossOutput, Metric


def metric(total, count, reduction="mean"):
    return Metric(
        total=torch.tensor(float(total)), count=torch.tensor(float(count)), reduction=reduction
    )


def test_means_are_weighted_by_their_counts():
    totals = Totals()
    for total, count in ((2.0 * 100, 100), (0.5 * 900, 900)):
        totals.add(LossOutput(loss=torch.zeros(()), metrics={"loss": metric(total, count)}))
    assert totals.reduced("train/") == {"train/loss": pytest.approx(0.65)}


def test_maxima_and_metrics_without_rows():
    totals = Totals()
    for value in (1.0, 3.0, 2.0):
        metrics = {"worst": metric(value, 0, "max"), "nothing": metric(0, 0)}
        totals.add(LossOutput(loss=torch.zeros(()), metrics=metrics))
    assert totals.reduced("") == {"worst": 3.0}


@pytest.mark.parametrize(
    ("first", "then"), [("mean", "max"), ("max", "mean"), ("mean", "sum"), ("max", "last")]
)
def test_a_metric_that_is_reduced_in_two_ways_is_refused(first, then):
    totals = Totals()
    totals.add(LossOutput(loss=torch.zeros(()), metrics={"worst": metric(1.0, 1, first)}))
    with pytest.raises(ContractError, match=f"metric 'worst' is reduced by '{then}'"):
        totals.add(LossOutput(loss=torch.zeros(()), metrics={"worst": metric(2.0, 1, then)}))


def parameters(*gradients):
    named = []
    for number, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor(gradient)
        named.append((f"p{number}", parameter))
    return named


def test_clipping_scales_to_the_limit_and_reports_the_norm_before():
    named = parameters([3.0, 0.0], [0.0, 4.0])
    norm, broken = clip_gradients(named, 1.0)
    assert (norm, broken) == (5.0, None)
    assert torch.cat([p.grad for _, p in named]).norm().item() == pytest.approx(1.0, rel=1e-5)


def test_the_first_non_finite_gradient_is_named():
    _, broken = clip_gradients(parameters([1.0, 1.0], [float("nan"), 0.0]), 1.0)
    assert broken == "non-finite gradient in p1"


def test_parameters_without_gradient_are_left_out():
    named = [*parameters([3.0, 4.0]), ("unused", nn.Parameter(torch.zeros(1)))]
    assert clip_gradients(named, 10.0) == (5.0, None)


def test_rows_of_one_rollout_are_averaged_by_name():
    assert mean_of([{"a": 1.0, "b": 4.0}, {"a": 3.0}]) == {"a": 2.0, "b": 4.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_taken_in_float32_whatever_dtype_the_gradients_have(dtype: torch.dtype) -> None:
    """In bfloat16 sqrt(90000 + 90000) would be 424, and in float16 the sum of squares overflows."""
    weights = [nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 300.0)
    norm, broken = clip_gradients([(f"w{n}", w) for n, w in enumerate(weights)], 1e9)
    assert norm == pytest.approx(300 * 2**0.5, rel=1e-6)
    assert broken is None
    assert [weight.grad.item() for weight in weights] == [300.0, 300.0]


def test_narrow_gradients_are_clipped_in_place_and_keep_their_dtype() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 8.0)
    norm, _ = clip_gradients([("w", weight)], 4.0)
    assert norm == 16.0
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [2.0] * 4


def test_no_gradient_has_norm_0() -> None:
    assert clip_gradients([("w", nn.Parameter(torch.zeros(1)))], 1.0) == (0.0, None)
