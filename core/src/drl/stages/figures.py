"""From the reports of an iteration's optimizer steps to the figures of its row; and what is alarming in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from drl.stages.step import mean_of
from drl.stages.totals import larger
from drl.types import StepReport

PER_UPDATE = ("train/ratio_mean", "train/ratio_abs_minus_1")
"""Figures that name their inner update as well: before the first one a ratio is 1, after it not."""

COUNTS = ("train/overflow_steps", "train/compiled_graphs", "train/recompilations")
"""Figures that count what a step had, and are added up."""

LARGEST = ("train/model_output_max_abs_diff", "train/model_output_rel_max")
"""Figures of which the largest counts."""


def training_figures(steps: Sequence[StepReport]) -> dict[str, float]:
    """Return means over the steps, sums and maxima, figures by inner update, and how many steps were skipped."""
    if not steps:
        return {}
    row = mean_of([{**step.metrics} for step in steps])
    row["train/skipped_steps"] = float(sum(step.skipped is not None for step in steps))
    for number, step in enumerate(steps):
        for name in PER_UPDATE:
            if name in step.metrics:
                row[f"{name}_update_{number}"] = step.metrics[name]
    for name in COUNTS:
        if name in row:
            row[name] = sum(step.metrics.get(name, 0.0) for step in steps)
    for name in LARGEST:
        if name in row:
            row[name] = reduce(
                larger, (step.metrics[name] for step in steps if name in step.metrics)
            )
    if steps:
        row["train/step"] = float(steps[-1].global_step)
        row["train/epoch"] = float(steps[-1].rollout_id)
    return row


def alarms(row: Mapping[str, float]) -> list[str]:
    """Return what a person must know about an iteration, one line each."""
    lines = []
    if count := row.get("rollout/identical_samples"):
        lines.append(
            f"alarm: {count:.0f} samples are identical to another of their group; "
            "their noise did not differ"
        )
    if row.get("train/ema_updates") == 2.0 and row.get("train/ema_distance") == 0.0:
        lines.append(
            "alarm: after 2 updates the moving average still equals the trained weights; a loss that "
            "compares the two learns nothing from it (ema.decay_init, ema.decay_flat_steps)"
        )
    return lines
