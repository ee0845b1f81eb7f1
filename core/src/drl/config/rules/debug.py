"""Rules of the modes, dumps and checks of ``[debug]``, and of where a run starts and ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from drl.config.automatic import needs
from drl.config.batch import kept_groups
from drl.config.draft import Draft
from drl.config.places import file_of, is_file
from drl.errors import Problem


def rollout_only(draft: Draft) -> Iterator[Problem]:
    """Generating without training excludes what trains."""
    if not draft.get("debug.rollout_only"):
        return
    loss = draft.get("algorithm.loss")
    if draft.get("train.train_only") or not needs(draft, "rollout"):
        yield Problem(
            "debug.rollout_only",
            f"is true, but this run has nothing to generate: algorithm.loss {loss!r}, train.train_only "
            f"{str(draft.get('train.train_only')).lower()}; choose one of the two modes",
        )
    if draft.get("debug.load_rollout_data") is not None:
        yield Problem(
            "debug.load_rollout_data",
            "reads rollouts to train on, and debug.rollout_only trains nothing; leave one of them out",
        )
    for key in ("skip_optimizer_step", "save_train_data"):
        if draft.given(f"debug.{key}") and draft.get(f"debug.{key}"):
            text = "is not used: debug.rollout_only trains nothing"
            yield Problem(f"debug.{key}", text, "warning")


def replayed_files(draft: Draft) -> Iterator[Problem]:
    """Every rollout of the run has its file, and none is written over."""
    source, rollouts = draft.get("debug.load_rollout_data"), draft.get("train.num_rollout")
    if source is None:
        return
    if source == draft.get("debug.save_rollout_data"):
        yield Problem(
            "debug.save_rollout_data",
            "is where debug.load_rollout_data reads; name other files to write",
        )
    first = draft.get("train.start_rollout_id") or 0
    files = [file_of(source, rollout_id=n) for n in range(first, rollouts or 0)]
    missing = [file for file in files if not is_file(file)]
    if missing:
        yield Problem(
            "debug.load_rollout_data",
            f"there is no file {missing[0]} ({len(missing)} of {len(files)} rollouts are missing); "
            "lower train.num_rollout, or record them with debug.save_rollout_data",
        )


def replayed_share(draft: Draft) -> Iterator[Problem]:
    """A share of a replayed rollout is whole groups, and at least one of them."""
    share, groups = draft.get("debug.load_rollout_subsample"), draft.get("rollout.batch_size")
    if share is None:
        return
    if draft.get("debug.load_rollout_data") is None:
        text = "is not used: debug.load_rollout_data is not set"
        yield Problem("debug.load_rollout_subsample", text, "warning")
    elif kept_groups(groups, share) == 0:
        yield Problem(
            "debug.load_rollout_subsample",
            f"keeps no group: {share} of rollout.batch_size = {groups} groups is less than one; give at "
            f"least {1 / groups:.4g}",
        )


def replay_without_evaluation(draft: Draft) -> Iterator[Problem]:
    """A replay has no engine that could evaluate."""
    if draft.get("debug.load_rollout_data") is not None and draft.get("eval.datasets"):
        text = "are not evaluated: debug.load_rollout_data runs without an engine"
        yield Problem("eval.datasets", text, "warning")


def compared_outputs(draft: Draft) -> Iterator[Problem]:
    """Model outputs are compared at recorded steps."""
    if draft.get("debug.engine_debug") and not needs(draft, "transition"):
        yield Problem(
            "debug.engine_debug",
            f"compares recorded steps, and algorithm.loss {draft.get('algorithm.loss')!r} trains on none; "
            "set it to false",
        )


def metric_of_ci(draft: Draft) -> Iterator[Problem]:
    """The check needs a figure, its threshold, and evaluations that have it."""
    ci = draft.get("debug.ci")
    values = {"metric_key": ci.metric_key, "metric_threshold": ci.metric_threshold}
    if not ci.enabled:
        for key, value in values.items():
            if value is not None:
                yield Problem(
                    f"debug.ci.{key}", "is not used: debug.ci.enabled is false", "warning"
                )
        return
    for key, value in values.items():
        if value is None:
            yield Problem(f"debug.ci.{key}", "is required by debug.ci.enabled")
    if ci.metric_key is None:
        return
    if not evaluates(draft):
        yield Problem(
            "debug.ci.enabled",
            "checks evaluations, and this run has none: give eval.datasets, and eval.interval or "
            "eval.after_train",
        )
        return
    names = [f"eval/{dataset.name}" for dataset in draft.get("eval.datasets")]
    if names and not any(
        ci.metric_key == name or ci.metric_key.startswith(f"{name}/") for name in names
    ):
        yield Problem(
            "debug.ci.metric_key",
            f"must name a figure of the evaluations ({', '.join(names)}), got {ci.metric_key!r}",
        )


def evaluates(draft: Draft) -> bool:
    """True when the run evaluates at least once."""
    sets = draft.get("eval.datasets") or draft.get("eval.function")
    if not sets or draft.get("train.train_only"):
        return False
    if draft.get("debug.load_rollout_data") is not None:
        return False
    if draft.get("eval.before_train") or draft.get("train.num_rollout") == 0:
        return True
    later: Any = draft.get("eval.after_train") or draft.get("eval.interval")
    return bool(later) and not draft.get("debug.rollout_only")


def start_within(draft: Draft) -> Iterator[Problem]:
    """The first iteration lies before the end."""
    first, rollouts = draft.get("train.start_rollout_id"), draft.get("train.num_rollout")
    if first is not None and rollouts is not None and first >= max(rollouts, 1):
        yield Problem(
            "train.start_rollout_id",
            f"must be below train.num_rollout = {rollouts}, got {first}; iterations count from 0",
        )


def length_by_epochs(draft: Draft) -> Iterator[Problem]:
    """B17: iterations are counted, or epochs of the data."""
    epochs, rollouts = draft.get("train.num_epoch"), draft.get("train.num_rollout")
    if epochs is not None and rollouts is not None:
        text = f"is ignored: train.num_rollout = {rollouts} is the length of the run (B17)"
        yield Problem("train.num_epoch", text, "warning")
    elif epochs is not None and not draft.get("data.global_dataset"):
        yield Problem(
            "train.num_epoch",
            "counts passes over the data, but data.global_dataset = false reads no prompts; give "
            "train.num_rollout",
        )


DEBUG_RULES = (
    rollout_only,
    replayed_files,
    replayed_share,
    replay_without_evaluation,
    compared_outputs,
    metric_of_ci,
    start_within,
    length_by_epochs,
)
