"""Rules about sizes and counts. B-numbers: docs/mathematics.md."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.config.steps import pairs_per_sample
from drl.errors import Problem


def length_of_run(draft: Draft) -> Iterator[Problem]:
    """B17: a run needs its number of iterations."""
    if draft.get("train.num_rollout") is None:
        yield Problem("train.num_rollout", "is required: the iterations of the run (B17)")


def evaluation_only(draft: Draft) -> Iterator[Problem]:
    """No iteration at all makes sense only with something to evaluate."""
    if draft.get("train.num_rollout") == 0 and not draft.get("eval.datasets"):
        yield Problem(
            "train.num_rollout",
            "is 0, which only evaluates: give eval.datasets, or a number above 0",
        )


def full_micro_batches(draft: Draft) -> Iterator[Problem]:
    """B9: the pairs of an optimizer step should fill its micro-batches."""
    size = draft.get("train.micro_batch_size")
    per_step = draft.get("train.global_batch_size")
    if per_step is None or not draft.given("train.micro_batch_size"):
        return
    pairs = per_step * pairs_per_sample(draft)
    if pairs % size:
        yield Problem(
            "train.micro_batch_size",
            f"B9: {pairs} pairs per optimizer step is not a multiple of {size}; "
            f"{size - pairs % size} rows of filler are added",
            "warning",
        )


def microgroup_within_group(draft: Draft) -> Iterator[Problem]:
    """A request never holds more than the samples of one prompt."""
    size, group = draft.get("rollout.microgroup_size"), draft.get("rollout.n_samples_per_prompt")
    if draft.given("rollout.microgroup_size") and size > group:
        yield Problem(
            "rollout.microgroup_size",
            f"is {size}, but a group has only rollout.n_samples_per_prompt = {group} samples",
            "warning",
        )


BATCH_RULES = (length_of_run, evaluation_only, full_micro_batches, microgroup_within_group)
