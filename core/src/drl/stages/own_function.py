"""Rollouts and evaluations that a function of the recipe makes, held to what the stages after it need."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drl.errors import BadInput, ContractError, RewardError, TrustError
from drl.stages.generate import named
from drl.types import Group, Rollout, Sample

if TYPE_CHECKING:
    from drl.run import Run

Function = Callable[..., Any]


def function_rollout(run: Run, rollout_id: int, function: Function) -> Rollout:
    """Call ``rollout.function`` and return its rollout, checked, its groups sorted by id."""
    made = function(run, rollout_id, run.source, evaluation=False)
    if not isinstance(made, Rollout):
        raise ContractError(f"rollout.function must return a drl.api.Rollout, got {named(made)}")
    if made.rollout_id != rollout_id:
        raise ContractError(
            f"rollout.function was asked for rollout {rollout_id} and returned {made.rollout_id}"
        )
    check_groups(made.groups)
    check_scored(run, made.samples)
    made.groups = sorted(made.groups, key=lambda group: group.group_index)
    # groups that the run numbers itself must never meet those of the function
    last = made.groups[-1].group_index
    run.counters.next_group = max(run.counters.next_group, last + 1)
    return made


def check_groups(groups: Sequence[Group]) -> None:
    """Raise ContractError unless there are groups, and each sample is in the group that it names, once."""
    strange = [group for group in groups if not isinstance(group, Group)]
    if strange:
        raise ContractError(
            f"rollout.function returned a rollout whose groups are no drl.api.Group: {named(strange)}"
        )
    if not groups or not all(group.samples for group in groups):
        raise ContractError("rollout.function returned a rollout without groups, or an empty group")
    for what, numbers in (
        ("group_index", [group.group_index for group in groups]),
        ("index", [sample.index for group in groups for sample in group.samples]),
    ):
        number, count = Counter(numbers).most_common(1)[0]
        if count > 1:
            raise ContractError(
                f"rollout.function returned {what} {number} {count} times; each counts once over a run"
            )
    for group in groups:
        _check_members(group)


def _check_members(group: Group) -> None:
    for sample in group.samples:
        if sample.group_index != group.group_index:
            raise ContractError(
                f"rollout.function put sample {sample.index} of group {sample.group_index} into "
                f"group {group.group_index}; advantages are worked out by these numbers"
            )
    windows = {one.trajectory.sde_steps for one in group.samples if one.trajectory is not None}
    if len(windows) > 1:
        raise ContractError(
            f"rollout.function gave the samples of group {group.group_index} different stochastic steps "
            f"({' and '.join(map(str, sorted(windows)))}); their advantages could not be compared"
        )


def check_scored(run: Run, samples: Sequence[Sample]) -> None:
    """Hold samples to the run's weights and to ``reward.on_failure``, as drl's own rollout is."""
    for sample in samples:
        if sample.version != run.version:
            raise TrustError(
                f"rollout.function returned sample {sample.index} of weights version {sample.version}, "
                f"but the loop pushed version {run.version}"
            )
        if sample.reward is None and run.recipe.reward.on_failure == "error":
            raise RewardError(
                f"rollout.function returned sample {sample.index} without a reward: set sample.reward, "
                'or reward.on_failure = "mask" to train on without such samples'
            )


def check_evaluates(run: Run) -> None:
    """Raise BadInput when ``rollout.function`` is to evaluate as well and cannot be told so."""
    function = run.functions.get("rollout.function")
    if function is None or run.functions.get("eval.function") is not None:
        return
    if run.evaluation_sets and not takes_evaluation(function):
        raise BadInput(
            "eval.function is not set, so rollout.function evaluates as well, but it takes no "
            "'evaluation'; give it that keyword argument, set eval.function (\"own\" is drl's own), or "
            "leave out eval.datasets"
        )


def function_evaluation(
    run: Run, done: int, option: str, function: Function
) -> dict[str, list[Sample]]:
    """Call the function of ``option`` for an evaluation; return its samples by the name of the set."""
    made = function(run, done, run.source, evaluation=True)
    if not isinstance(made, Mapping):
        raise ContractError(
            f"{option} must return samples by the name of their set for an evaluation, got {named(made)}"
        )
    for name, samples in made.items():
        fine = isinstance(samples, (list, tuple)) and samples
        if not fine or not all(isinstance(one, Sample) for one in samples):
            raise ContractError(
                f"{option} must return a list of drl.api.Sample for set {name!r}, got {named(samples)}"
            )
    return {str(name): list(samples) for name, samples in made.items()}


def takes_evaluation(function: Function) -> bool:
    """True when a function takes ``evaluation`` by name, so that it knows which of the two is wanted."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == "evaluation" or p.kind is p.VAR_KEYWORD for p in parameters)
