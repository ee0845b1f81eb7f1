"""Classifier-free guidance."""

from __future__ import annotations

import pytest
import torch

from drl.mathematics.guidance import combine
from drl.types import Guidance, Sampling


@pytest.mark.parametrize(("scale", "expected"), [(0.0, 1.0), (1.0, 3.0), (4.5, 10.0)])
def test_scale_goes_from_unconditional_over_conditional_and_beyond(
    scale: float, expected: float
) -> None:
    assert float(combine(torch.tensor(1.0), torch.tensor(3.0), scale)) == expected


def test_stays_in_the_dtype_of_the_model() -> None:
    unconditional, conditional = (torch.randn(2, 3, dtype=torch.bfloat16) for _ in range(2))
    combined = combine(unconditional, conditional, 4.5)
    assert combined.dtype == torch.bfloat16
    step = (conditional - unconditional) * 4.5
    assert torch.equal(combined, unconditional + step)


def test_equal_predictions_are_untouched() -> None:
    prediction = torch.randn(2, 3)
    assert torch.equal(combine(prediction, prediction, 7.0), prediction)


@pytest.mark.parametrize(
    ("scale", "true_scale", "effective"),
    [
        (4.5, None, 4.5),
        (1.0, None, None),
        (1.0001, None, 1.0001),
        (0.5, None, None),
        (0.0, None, None),
        (4.5, 1.0, None),
        (1.0, 4.0, 4.0),
        (3.0, 4.0, 4.0),
    ],
)
def test_a_negative_branch_runs_above_one_and_the_true_scale_wins(
    scale: float, true_scale: float | None, effective: float | None
) -> None:
    guidance = Guidance(scale=scale, true_scale=true_scale)
    assert guidance.on == (effective is not None)
    sampling = Sampling(
        num_steps=4, height=8, width=8, guidance_scale=scale, true_cfg_scale=true_scale
    )
    assert sampling.guided == guidance.on
    if effective is not None:
        assert guidance.effective == effective
