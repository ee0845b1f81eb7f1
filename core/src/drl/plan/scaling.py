"""The batch arithmetic of a recipe on other numbers of GPUs: the update sees the same images on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drl.stages.pairs import BatchPlan


def scaled(plan: BatchPlan, gpus: Sequence[int]) -> list[BatchPlan]:
    """Return the plan on each of these numbers of ranks."""
    return [replace(plan, ranks=count) for count in gpus]


def scaled_lines(plan: BatchPlan, gpus: Sequence[int]) -> list[str]:
    """Return one line per number of GPUs; none without numbers.

    Batch sizes count all ranks together, so neither the images of an update, nor the groups, nor the
    learning rate depend on the number of GPUs; what changes is each rank's share, and filler.
    """
    lines = []
    for one in scaled(plan, gpus):
        filler = f", {one.filler} rows of filler" if one.filler else ""
        lines.append(
            f"{one.ranks} GPU(s): {one.samples_per_step} images per update, "
            f"{one.micro_batches} micro-batches of {one.rows} pairs on each{filler}"
        )
    if lines:
        lines.append(
            "learning rate, groups and updates stay as they are: batch sizes count all ranks together"
        )
    return lines
