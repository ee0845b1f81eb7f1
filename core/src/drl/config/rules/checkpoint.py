"""Rules about what of a run is saved, what stays, and what a run starts from."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.draft import Draft
from drl.config.places import is_folder
from drl.errors import Problem

NOISY = "/rollout_sampler"
"""Suffix of the figures under the rollout's own sampler."""


def loaded_folder(draft: Draft) -> Iterator[Problem]:
    """What is loaded must exist, and what belongs to loading needs something to load."""
    load = draft.get("checkpoint.load")
    if load is None and draft.get("checkpoint.step") is not None:
        yield Problem(
            "checkpoint.step",
            "is not used: there is no checkpoint.load, which names the run that it is about",
            "warning",
        )
    elif load is not None and not is_folder(load):
        yield Problem(
            "checkpoint.load",
            f"there is no folder {load}; give a run directory, its checkpoints folder or one checkpoint",
        )


def best_checkpoints(draft: Draft) -> Iterator[Problem]:
    """The best are chosen by a figure that the run has, among checkpoints that may be deleted."""
    metric = draft.get("checkpoint.best_metric")
    if not draft.get("checkpoint.keep_best"):
        if metric is not None:
            yield Problem(
                "checkpoint.best_metric", "is not used: checkpoint.keep_best is 0", "warning"
            )
        return
    if draft.get("checkpoint.keep_last") is None:
        yield Problem(
            "checkpoint.keep_best",
            "has no effect while every checkpoint stays: set checkpoint.keep_last",
        )
    names = [f"eval/{dataset.name}" for dataset in draft.get("eval.datasets")]
    have = f"eval.datasets gives {', '.join(names) or 'none'}"
    if metric is None:
        yield Problem(
            "checkpoint.best_metric",
            f"is required by checkpoint.keep_best: the figure of an evaluation; {have}",
        )
    elif draft.get("eval.function") or draft.get("rollout.function"):
        return  # the function names its own sets
    elif metric.removesuffix(NOISY) not in names:
        yield Problem("checkpoint.best_metric", f"no evaluation has the figure {metric!r}; {have}")
    elif metric.endswith(NOISY) and not draft.get("eval.rollout_sampler"):
        yield Problem("checkpoint.best_metric", f"{metric!r} needs eval.rollout_sampler = true")


def evaluations_for_the_best(draft: Draft) -> Iterator[Problem]:
    """One evaluation at the end scores one checkpoint."""
    if draft.get("checkpoint.keep_best") and not draft.get("eval.interval"):
        yield Problem(
            "eval.interval",
            "is 0, so only the last iteration is scored for checkpoint.keep_best",
            "warning",
        )


def whose_schedule(draft: Draft) -> Iterator[Problem]:
    """The schedule of a loaded run is the checkpoint's or the recipe's."""
    both = ("optimizer.use_checkpoint_lr_scheduler", "optimizer.override_lr_scheduler")
    if draft.get(both[1]) and draft.get(both[0]) and draft.given(both[0]):
        yield Problem(
            both[1],
            f"excludes {both[0]} = true: the schedule is the recipe's or the checkpoint's",
        )


def without_optimizer_state(draft: Draft) -> Iterator[Problem]:
    """A checkpoint without the optimizer's state does not continue a run."""
    if not draft.get("checkpoint.save_optim"):
        yield Problem(
            "checkpoint.save_optim",
            "is false: an interrupted run can be resumed only with checkpoint.load_optim = false, which "
            "starts the optimizer anew",
            "warning",
        )


CHECKPOINT_RULES = (
    loaded_folder,
    best_checkpoints,
    evaluations_for_the_best,
    whose_schedule,
    without_optimizer_state,
)
