"""The row of an iteration: means, sums, figures by inner update, alarms."""

from __future__ import annotations

import math

import pytest

from drl.stages.figures import alarms, training_figures
from drl.types import StepReport


def report(step: int, *, skipped: str | None = None, **metrics: float) -> StepReport:
    named = {f"train/{name}": value for name, value in metrics.items()}
    return StepReport(
        rollout_id=0, window=step, global_step=7 + step, metrics=named, skipped=skipped
    )


def test_figures_are_means_over_the_steps_that_have_them() -> None:
    row = training_figures([report(0, loss=1.0, grad_norm=4.0), report(1, loss=3.0)])
    assert (row["train/loss"], row["train/grad_norm"]) == (2.0, 4.0)
    assert row["train/step"] == 8.0


def test_a_maximum_is_one_over_the_steps_too() -> None:
    steps = [report(n, model_output_max_abs_diff=value) for n, value in enumerate((0.1, 0.9, 0.2))]
    name = "train/model_output_max_abs_diff"
    assert training_figures([*steps, report(3)])[name] == 0.9
    broken = report(3, model_output_max_abs_diff=float("nan"))
    assert math.isnan(training_figures([*steps, broken])[name])


def test_a_ratio_names_its_inner_update() -> None:
    row = training_figures([report(0, ratio_mean=1.0), report(1, ratio_mean=1.5)])
    assert row["train/ratio_mean"] == 1.25
    assert (row["train/ratio_mean_update_0"], row["train/ratio_mean_update_1"]) == (1.0, 1.5)


def test_overflows_are_added_up_beside_all_skipped_steps() -> None:
    steps = [
        report(0, skipped="overflow at loss scale 65536", overflow_steps=1.0, loss_scale=32768.0),
        report(1, skipped="overflow at loss scale 32768", overflow_steps=1.0, loss_scale=16384.0),
        report(2, skipped="non-finite loss in micro-batch 0", overflow_steps=0.0),
        report(3, overflow_steps=0.0, loss_scale=16384.0),
    ]
    row = training_figures(steps)
    assert (row["train/skipped_steps"], row["train/overflow_steps"]) == (3.0, 2.0)
    assert row["train/loss_scale"] == pytest.approx((32768 + 2 * 16384) / 3)


def test_graphs_are_added_up_over_the_steps() -> None:
    steps = [report(0, compiled_graphs=4.0, recompilations=0.0)]
    steps += [report(1, compiled_graphs=1.0, recompilations=1.0)]
    row = training_figures(steps)
    assert (row["train/compiled_graphs"], row["train/recompilations"]) == (5.0, 1.0)


def test_a_run_without_scaler_has_no_overflows_and_one_without_steps_no_step() -> None:
    assert "train/overflow_steps" not in training_figures([report(0, loss=1.0)])
    assert training_figures([]) == {}


@pytest.mark.parametrize(
    ("updates", "distance", "alarming"),
    [(1.0, 0.0, False), (2.0, 0.0, True), (2.0, 1e-9, False), (3.0, 0.0, False)],
)
def test_an_average_that_equals_the_weights_is_alarming_at_the_second_update(
    updates: float, distance: float, alarming: bool
) -> None:
    lines = alarms({"train/ema_updates": updates, "train/ema_distance": distance})
    assert bool(lines) is alarming
    assert not alarming or "still equals the trained weights" in lines[0]


def test_identical_samples_are_alarming() -> None:
    (line,) = alarms({"rollout/identical_samples": 2.0})
    assert line.startswith("alarm: 2 samples are identical to another of their group")
    assert alarms({"rollout/identical_samples": 0.0}) == []
    assert alarms({}) == []
