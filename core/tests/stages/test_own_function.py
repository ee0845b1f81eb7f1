"""A rollout and an evaluation that a function of the recipe makes, checked like drl's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_collect import drawn, runs_in

from drl.builtin.functions_rollout import own
from drl.errors import BadInput, ContractError, RewardError, TrustError
from drl.stages.collect import collect
from drl.stages.evaluate import EvaluationSet, evaluation_samples
from drl.stages.own_function import check_evaluates
from drl.testing import make_sample
from drl.types import Group, Rollout


@pytest.fixture
def run_of(tmp_path: Path) -> Any:
    """Makes a run over eight prompts."""
    return runs_in(tmp_path)


def test_a_rollout_function_may_change_drls_own_rollout(run_of: Any) -> None:
    def first_only(run: Any, rollout_id: int, source: Any, *, evaluation: bool) -> Any:
        rollout = own(run, rollout_id, source)
        rollout.groups.reverse()
        rollout.metrics = {"rollout/mine": 1.0}
        return rollout

    run = run_of({"rollout.function": first_only})
    rollout = collect(run, 3)
    assert drawn(rollout) == [(0, 1), (1, 2)]  # sorted again
    assert rollout.metrics == {"rollout/mine": 1.0}
    assert run.counters.images_seen == 4


def lone(index: int = 7, group: int = 3, **changes: Any) -> Any:
    sample = make_sample(index=index, group_index=changes.pop("of", group), reward=0.5)
    for name, value in changes.items():
        setattr(sample, name, value)
    return Group(group_index=group, prompt=sample.prompt, samples=[sample])


def windows(*steps: tuple[int, ...]) -> Group:
    samples = [make_sample(index=n, group_index=3, steps=3, reward=0.5) for n in range(len(steps))]
    for sample, chosen in zip(samples, steps, strict=True):
        assert sample.trajectory is not None
        sample.trajectory = replace(sample.trajectory, sde_steps=chosen)
    return Group(group_index=3, prompt=samples[0].prompt, samples=samples)


def test_group_numbers_go_on_after_those_of_a_function(run_of: Any) -> None:
    def mine(run: Any, rollout_id: int, source: Any, *, evaluation: bool) -> Any:
        return Rollout(rollout_id=rollout_id, version=0, groups=[lone(group=11)])

    run = run_of({"rollout.function": mine})
    collect(run, 0)
    assert run.counters.next_group == 12


@pytest.mark.parametrize(
    ("groups", "error", "said"),
    [
        ([], ContractError, "without groups"),
        ([lone().samples], ContractError, "groups are no drl.api.Group: a list of list"),
        ([lone(), lone(index=8)], ContractError, "group_index 3 2 times"),
        ([lone(), lone(group=4)], ContractError, "index 7 2 times"),
        ([windows((0, 1), (1, 2))], ContractError, r"\(0, 1\) and \(1, 2\)\); their advantages"),
        ([lone(of=9)], ContractError, "sample 7 of group 9 into group 3"),
        ([lone(version=2)], TrustError, "weights version 2, but the loop pushed version 0"),
        ([lone(reward=None)], RewardError, "sample 7 without a reward"),
    ],
)
def test_a_function_rollout_is_checked_like_drls_own(
    run_of: Any, groups: list[Group], error: type[Exception], said: str
) -> None:
    def mine(run: Any, rollout_id: int, source: Any, *, evaluation: bool) -> Any:
        return Rollout(rollout_id=rollout_id, version=0, groups=groups)

    with pytest.raises(error, match=said):
        collect(run_of({"rollout.function": mine}), 0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([lone()], "must return a drl.api.Rollout, got a list of Group"),
        (Rollout(rollout_id=9, version=0, groups=[lone()]), "asked for rollout 0 and returned 9"),
    ],
)
def test_a_function_returns_the_rollout_that_it_was_asked_for(
    run_of: Any, answer: Any, said: str
) -> None:
    with pytest.raises(ContractError, match=said):
        collect(run_of({"rollout.function": lambda *a, evaluation: answer}), 0)


def evaluating(run: Any, done: int, source: Any, *, evaluation: bool) -> Any:
    run.asked = (done, evaluation)
    return {"mine": [make_sample(reward=0.25)], "yours": (make_sample(reward=0.75),)}


@pytest.mark.parametrize("option", ["eval.function", "rollout.function"])
def test_an_evaluation_may_be_made_by_a_function(run_of: Any, option: str) -> None:
    run = run_of({option: evaluating})
    found = evaluation_samples(run, 3)
    assert {name: [s.reward for s in samples] for name, samples in found.items()} == {
        "mine": [0.25],
        "yours": [0.75],
    }
    assert run.asked == (3, True)


def test_the_function_for_evaluations_wins_over_that_for_rollouts(run_of: Any) -> None:
    def never(run: Any, done: int, source: Any, *, evaluation: bool) -> Any:
        raise AssertionError

    run = run_of({"eval.function": evaluating, "rollout.function": never})
    assert set(evaluation_samples(run, 1)) == {"mine", "yours"}


def only_rollouts(run: Any, rollout_id: int, source: Any) -> Any:
    raise AssertionError


def test_a_rollout_function_that_knows_of_no_evaluation_is_refused_before_the_run_begins(
    run_of: Any,
) -> None:
    run = run_of({"rollout.function": only_rollouts})
    run.evaluation_sets = (EvaluationSet(name="words", prompts=()),)
    with pytest.raises(BadInput, match=r"takes no 'evaluation'; .* set eval.function"):
        check_evaluates(run)


@pytest.mark.parametrize(
    ("functions", "sets"),
    [
        ({"rollout.function": only_rollouts}, ()),
        ({"rollout.function": only_rollouts, "eval.function": own}, ("words",)),
        ({"rollout.function": evaluating}, ("words",)),
        ({"rollout.function": lambda *a, **more: None}, ("words",)),
        ({}, ("words",)),
    ],
)
def test_it_is_enough_that_one_function_can_evaluate_or_none_has_to(
    run_of: Any, functions: Any, sets: tuple[str, ...]
) -> None:
    run = run_of(functions)
    run.evaluation_sets = tuple(EvaluationSet(name=name, prompts=()) for name in sets)
    check_evaluates(run)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([make_sample()], "by the name of their set for an evaluation, got a list of Sample"),
        ({"mine": []}, "for set 'mine', got a list"),
        ({"mine": [0.5]}, "for set 'mine', got a list of float"),
    ],
)
def test_a_function_that_returns_no_samples_by_set_is_named(
    run_of: Any, answer: Any, said: str
) -> None:
    run = run_of({"eval.function": lambda *a, evaluation: answer})
    with pytest.raises(ContractError, match=f"eval.function must return.*{said}"):
        evaluation_samples(run, 0)
