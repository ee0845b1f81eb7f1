"""Accumulation, clipping and what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drl.errors import ContractError
from drl.stages.step import mean_of, start_clipping
from drl.stages.totals import Totals
from drl.types import Metric


def metric(total, count, reduction="mean"):
    return Metric(
        total=torch.tensor(float(total)), count=torch.tensor(float(count)), reduction=reduction
    )


def test_means_are_weighted_by_their_counts():
    totals = Totals()
    for total, count in ((2.0 * 100, 100), (0.5 * 900, 900)):
        totals.add({"loss": metric(total, count)}, torch.zeros(()))
    assert totals.read()[0].reduced("train/") == {"train/loss": pytest.approx(0.65)}


def test_maxima_and_metrics_without_rows():
    totals = Totals()
    for value in (1.0, 3.0, 2.0):
        metrics = {"worst": metric(value, 0, "max"), "nothing": metric(0, 0)}
        totals.add(metrics, torch.zeros(()))
    assert totals.read()[0].reduced("") == {"worst": 3.0}


@pytest.mark.parametrize(
    ("first", "then"), [("mean", "max"), ("max", "mean"), ("mean", "sum"), ("max", "last")]
)
def test_a_metric_that_is_reduced_in_two_ways_is_refused(first, then):
    totals = Totals()
    totals.add({"worst": metric(1.0, 1, first)}, torch.zeros(()))
    with pytest.raises(ContractError, match=f"metric 'worst' is reduced by '{then}'"):
        totals.add({"worst": metric(2.0, 1, then)}, torch.zeros(()))


def parameters(*gradients):
    named = []
    for number, gradient in enumerate(gradients):
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.tensor(gradient)
        named.append((f"p{number}", parameter))
    return named


def test_clipping_scales_to_the_limit_and_reports_the_norm_before():
    named = parameters([3.0, 0.0], [0.0, 4.0])
    norm, broken = start_clipping(named, 1.0)()
    assert (norm, broken) == (5.0, None)
    assert torch.cat([p.grad for _, p in named]).norm().item() == pytest.approx(1.0, rel=1e-5)


def test_the_first_non_finite_gradient_is_named():
    _, broken = start_clipping(parameters([1.0, 1.0], [float("nan"), 0.0]), 1.0)()
    assert broken == "non-finite gradient in p1"


def test_parameters_without_gradient_are_left_out():
    named = [*parameters([3.0, 4.0]), ("unused", nn.Parameter(torch.zeros(1)))]
    assert start_clipping(named, 10.0)() == (5.0, None)


def test_rows_of_one_rollout_are_averaged_by_name():
    assert mean_of([{"a": 1.0, "b": 4.0}, {"a": 3.0}]) == {"a": 2.0, "b": 4.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_taken_in_float32_whatever_dtype_the_gradients_have(dtype: torch.dtype) -> None:
    """In bfloat16 sqrt(90000 + 90000) would be 424, and in float16 the sum of squares overflows."""
    weights = [nn.Parameter(torch.zeros(1, dtype=dtype)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 300.0)
    norm, broken = start_clipping([(f"w{n}", w) for n, w in enumerate(weights)], 1e9)()
    assert norm == pytest.approx(300 * 2**0.5, rel=1e-6)
    assert broken is None
    assert [weight.grad.item() for weight in weights] == [300.0, 300.0]


def test_narrow_gradients_are_clipped_in_place_and_keep_their_dtype() -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 8.0)
    norm, _ = start_clipping([("w", weight)], 4.0)()
    assert norm == 16.0
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [2.0] * 4


def test_no_gradient_has_norm_0() -> None:
    assert start_clipping([("w", nn.Parameter(torch.zeros(1)))], 1.0)() == (0.0, None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_norm_that_is_not_finite_changes_no_gradient(bad: float) -> None:
    """Finite gradients whose norm overflows too: what is good stays, to be looked at."""
    named = parameters([1.0, 2.0], [bad, bad])
    norm, broken = start_clipping(named, 0.5)()
    assert not norm < float("inf")
    assert broken == ("gradient norm overflows" if bad == 3e38 else "non-finite gradient in p1")
    assert named[0][1].grad.tolist() == [1.0, 2.0]
    assert named[1][1].grad[0].item() == pytest.approx(bad, nan_ok=True)


def test_clipping_has_the_bits_of_torchs_own() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(7, 5, generator=generator) for _ in range(9)]
    ours, theirs = ([nn.Parameter(torch.zeros(7, 5)) for _ in gradients] for _ in range(2))
    for one, other, gradient in zip(ours, theirs, gradients, strict=True):
        one.grad, other.grad = gradient.clone(), gradient.clone()
    norm, _ = start_clipping([(str(n), p) for n, p in enumerate(ours)], 0.3)()
    total = torch.nn.utils.clip_grad_norm_(theirs, 0.3)
    assert norm == total.item()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
