"""Batch arithmetic of a recipe, checked where the recipe is (rules B1 to B9 of docs/mathematics.md)."""

from __future__ import annotations

from drl.errors import BatchError


def batch_knobs(samples: int, per_step: int | None, steps: int | None) -> tuple[int, int]:
    """Return (samples per optimizer step, optimizer steps) of a rollout of ``samples`` samples.

    Neither knob set: one step. Raises BatchError when the knobs contradict each other (B3) or do not
    divide the samples (B4).
    """
    if steps is not None and samples % steps:
        raise BatchError(
            f"B4: samples per rollout {samples} is not divisible by train.num_steps_per_rollout={steps}"
        )
    if per_step is not None and samples % per_step:
        raise BatchError(
            f"B4: samples per rollout {samples} is not divisible by train.global_batch_size={per_step}"
        )
    if steps is not None and per_step is not None and steps * per_step != samples:
        raise BatchError(
            f"B3: train.global_batch_size={per_step} contradicts rollout.batch_size x "
            f"rollout.n_samples_per_prompt / train.num_steps_per_rollout = {samples // steps}"
        )
    if per_step is not None:
        return per_step, samples // per_step
    chosen = 1 if steps is None else steps
    return samples // chosen, chosen


def kept_groups(groups: int, share: float | None) -> int:
    """Return how many of some groups a share of them is, rounded down; all of them without a share."""
    return groups if share is None else int(groups * share)
