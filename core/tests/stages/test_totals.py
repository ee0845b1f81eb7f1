"""A window's figures: exact sums of what micro-batches left on the device."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drl.stages.totals import Figures, Totals, larger
from drl.types import Metric

NAN = float("nan")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def mean_of(total: Tensor, count: Tensor) -> Metric:
    return Metric(total=total, count=count)


@given(rows=st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=20))
def test_sums_are_those_of_float64_in_order(rows: list[tuple[float, float]]) -> None:
    totals = Totals()
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for value, weight in rows:
        one, of = torch.tensor(value), torch.tensor(weight)
        totals.add({"loss": mean_of(one, of)}, one)
        total, count = total + one.double(), count + of.double()
    figures, losses = totals.read()
    assert figures == Figures({"loss": total.item()}, {"loss": count.item()}, {})
    assert losses == [torch.tensor(value).item() for value, _ in rows]


def test_figures_of_any_dtype_are_taken_as_they_are() -> None:
    """A float32 holds neither 2^53 - 1 nor 1/3 of float64."""
    totals = Totals()
    metrics = {
        "whole": mean_of(torch.tensor(2**53 - 1), torch.tensor(True)),
        "third": mean_of(torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(1)),
        "half": mean_of(torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor([2.0])),
    }
    totals.add(metrics, torch.tensor(1.0))
    figures, _ = totals.read()
    assert figures.sums == {"whole": 2.0**53 - 1, "third": 1 / 3, "half": 0.5}
    assert figures.counts == {"whole": 1.0, "third": 1.0, "half": 2.0}


def test_micro_batches_need_not_have_the_same_metrics() -> None:
    totals = Totals()
    one = torch.tensor(1.0)
    totals.add({"loss": mean_of(2 * one, one), "loss_a": mean_of(2 * one, one)}, one)
    totals.add({"loss": mean_of(4 * one, one)}, 3 * one)
    totals.add({"loss_b": mean_of(5 * one, 2 * one)}, 5 * one)
    figures, losses = totals.read()
    assert figures.sums == {"loss": 6.0, "loss_a": 2.0, "loss_b": 5.0}
    assert figures.counts == {"loss": 2.0, "loss_a": 1.0, "loss_b": 2.0}
    assert losses == [1.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [((1.0, 3.0, 2.0), 3.0), ((-5.0, -7.0), -5.0), ((NAN, 1.0), NAN), ((1.0, NAN, 2.0), NAN)],
)
def test_a_maximum_over_micro_batches_shows_nan(values: tuple[float, ...], expected: float) -> None:
    totals = Totals()
    for value in values:
        worst = Metric(total=torch.tensor(value), count=torch.ones(()), reduction="max")
        totals.add({"worst": worst}, torch.zeros(()))
    figures, _ = totals.read()
    found = figures.maxima["worst"]
    assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert figures.reduced("train/").keys() == {"train/worst"}


def test_the_larger_of_two_is_nan_whichever_is() -> None:
    assert math.isnan(larger(NAN, 1.0))
    assert math.isnan(larger(1.0, NAN))
    assert larger(1.0, 2.0) == larger(2.0, 1.0) == 2.0


def test_nothing_was_run() -> None:
    assert Totals().read() == (Figures({}, {}, {}), [])


def test_the_graph_of_a_loss_is_let_go() -> None:
    """Kept losses hold their micro-batch's activations otherwise."""
    weight = torch.ones((), requires_grad=True)
    totals = Totals()
    totals.add({"loss": mean_of(weight * 2, weight * 1)}, weight * 3)
    assert not any(vector.requires_grad for vector in totals._vectors)
