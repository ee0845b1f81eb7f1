"""Replay: an iteration's rollout from the file that another run dumped, without any engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drl.config.batch import kept_groups
from drl.config.places import file_of
from drl.dumps import read_dump
from drl.errors import DataError
from drl.stages.dump import ROLLOUT
from drl.stages.rollout import training_sampling
from drl.types import Group, Rollout, Sample, Sampling, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from drl.run import Run


def replay(run: Run, rollout_id: int) -> Rollout:
    """Return the rollout of an iteration as it was dumped: scored, filtered, in its order.

    Raises DataError for a file that is missing, damaged, of another iteration, or made with other
    settings or another schedule than this recipe's.
    """
    debug = run.recipe.debug
    path = file_of(debug.load_rollout_data, rollout_id=rollout_id)
    content = read_dump(path, ROLLOUT)
    rollout = rollout_of(path, content, rollout_id)
    if run.needs_rollout:
        wanted = training_sampling(run.recipe)
        check_settings(path, content.get("settings"), wanted)
        check_schedules(path, rollout.samples, run.schedule(wanted))
    if debug.load_rollout_subsample is not None:
        rollout.groups = first_and_last(path, rollout.groups, debug.load_rollout_subsample)
    run.counters.images_seen += len(rollout.samples)
    following = 1 + max(group.group_index for group in rollout.groups)
    run.counters.next_group = max(run.counters.next_group, following)
    run.hooks.drl_rollout_finished(run=run, rollout=rollout)
    return rollout


def rollout_of(path: Path, content: Mapping[str, Any], rollout_id: int) -> Rollout:
    """Return the rollout in a file's content; DataError when it is another one, or none."""
    groups, number = content.get("groups"), content.get("rollout_id")
    if number != rollout_id:
        raise DataError(
            f"{path} holds rollout {number}, not {rollout_id}; files must keep the names they were written "
            "with (debug.load_rollout_data)"
        )
    whole = isinstance(groups, list) and all(is_whole(group) for group in groups)
    if not whole or not groups:
        raise DataError(f"{path} holds no groups of samples; record it again")
    return Rollout(
        rollout_id=rollout_id,
        version=counted(content.get("weights")),
        groups=groups,
        dropped={name: counted(count) for name, count in mapping(content.get("dropped")).items()},
        metrics=mapping(content.get("metrics")),
        logged=bool(content.get("logged", True)),
    )


def is_whole(group: object) -> bool:
    """True for a group of samples that can be numbered and whose paths have their tensors."""
    return (
        isinstance(group, Group)
        and isinstance(group.group_index, int)
        and isinstance(group.samples, list)
        and bool(group.samples)
        and all(isinstance(sample, Sample) and has_path(sample) for sample in group.samples)
    )


def has_path(sample: Sample) -> bool:
    """True for a sample without a path, or with the numbers of one."""
    path: object = sample.trajectory
    if path is None:
        return True
    return isinstance(path, Trajectory) and all(
        isinstance(part, torch.Tensor) for part in (path.sigmas, path.timesteps, path.log_probs)
    )


def counted(value: object) -> int:
    """Return a count of a dump; 0 for what is none."""
    return value if isinstance(value, int) else 0


def mapping(value: object) -> Mapping[str, Any]:
    """Return a table of a dump; an empty one for what is none."""
    return value if isinstance(value, Mapping) else {}


def first_and_last(path: Path, groups: Sequence[Group], share: float) -> list[Group]:
    """Return a share of the groups, r of them: the first ``r // 2`` and the last ones; DataError for r = 0."""
    count = kept_groups(len(groups), share)
    if count == 0:
        raise DataError(
            f"debug.load_rollout_subsample = {share} keeps none of the {len(groups)} groups of {path}; give "
            f"at least {1 / len(groups):.4g}"
        )
    head = count // 2
    return [*groups[:head], *groups[len(groups) - (count - head) :]]


def check_settings(path: Path, used: object, wanted: Sampling) -> None:
    """Raise DataError unless a dump was made with the settings of this recipe."""
    if not isinstance(used, Sampling):
        raise DataError(f"{path} does not say how its samples were made; it is of another loss")
    mine, theirs = asdict(wanted), asdict(used)
    lines = [
        f"  {name}: the dump has {theirs[name]!r}, the recipe {value!r}"
        for name, value in mine.items()
        if theirs[name] != value
    ]
    if lines:
        raise DataError(
            f"{path} was made with other settings than this recipe's ([sampling], [sde])\n"
            + "\n".join(lines)
        )


def check_schedules(path: Path, samples: Sequence[Sample], expected: Tensor | None) -> None:
    """Raise DataError unless all samples have one noise schedule, the trainer's where that is known."""
    paths = [sample.trajectory for sample in samples if sample.trajectory is not None]
    for trajectory in paths:
        right = paths[0].sigmas if expected is None else expected
        if trajectory.sigmas.shape != right.shape or not torch.allclose(
            trajectory.sigmas, right, rtol=0, atol=2e-7
        ):
            raise DataError(
                f"{path} was made with another noise schedule than this recipe's (sampling.flow_shift, "
                f"sampling.num_steps)\n  the dump: {shown(trajectory)}\n  here:     {numbers(right)}"
            )


def shown(trajectory: Trajectory) -> str:
    """Return the sigmas of a trajectory, for a message."""
    return numbers(trajectory.sigmas)


def numbers(sigmas: Tensor) -> str:
    """Return sigmas, for a message."""
    return "[" + ", ".join(f"{value:.4f}" for value in sigmas.tolist()) + "]"
