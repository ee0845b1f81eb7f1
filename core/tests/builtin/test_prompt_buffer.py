"""The buffer of groups that came back: who leaves first, and what a checkpoint holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from drl.builtin.prompt_buffer import PromptBuffer
from drl.errors import ContractError
from drl.testing import make_sample
from drl.types import Group, Prompt


def group(index: int, *rewards: float | None) -> Group:
    samples = [
        make_sample(index=10 * index + n, group_index=index, member=n, seed=n, steps=2, reward=r)
        for n, r in enumerate(rewards)
    ]
    for sample in samples:
        sample.version, sample.prompt = 3, prompt(index, 1)
    return Group(group_index=index, prompt=prompt(index, 1), samples=samples)


def prompt(row: int, epoch: int) -> Prompt:
    return Prompt(row=row, text=f"row {row}", epoch=epoch)


def filled(*groups: Group) -> PromptBuffer:
    buffer = PromptBuffer()
    buffer.add(groups)
    return buffer


def rows(prompts: list[Prompt]) -> list[int]:
    return [one.row for one in prompts]


def test_the_oldest_groups_leave_first() -> None:
    buffer = filled(group(4), group(2), group(9))
    assert rows(buffer.take(2)) == [4, 2]
    assert rows(buffer.take(2)) == [9]
    assert buffer.take(2) == []


def test_a_choice_may_look_at_rewards_and_throw_groups_away() -> None:
    def best(groups: list[Group], count: int) -> list[Group]:
        groups[:] = [one for one in groups if one.samples[0].reward is not None]
        groups.sort(key=lambda one: -one.samples[0].reward)  # type: ignore[operator]
        return [groups.pop(0) for _ in range(min(count, len(groups)))]

    buffer = filled(group(1, 0.5), group(2, None), group(3, 0.75))
    buffer.choose = best
    assert rows(buffer.take(1)) == [3]
    assert [one.group_index for one in buffer.groups] == [1]


def test_a_chosen_group_leaves_even_when_the_choice_forgot_to_take_it_out() -> None:
    buffer = filled(group(1), group(2))
    buffer.choose = lambda groups, count: groups[:count]
    assert (rows(buffer.take(1)), rows(buffer.take(1)), rows(buffer.take(1))) == ([1], [2], [])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda groups, count: None, "must return a list of groups of the buffer, got NoneType"),
        (lambda groups, count: [group(7)], "must return a list of groups of the buffer"),
        (lambda groups, count: list(groups), r"at most 1 groups, each once, and returned \[1, 2\]"),
        (lambda groups, count: [groups[0]] * 2, r"returned \[1, 1\]"),
    ],
)
def test_a_choice_that_is_none_is_named(answer: Any, said: str) -> None:
    buffer = filled(group(1), group(2))
    buffer.choose = answer
    with pytest.raises(ContractError, match=said):
        buffer.take(1)


def test_a_checkpoint_holds_what_a_choice_may_look_at() -> None:
    buffer = filled(group(5, 0.5, None), group(6))
    restored = PromptBuffer()
    restored.restore(json.loads(json.dumps(buffer.state())), prompt)
    assert restored.groups == buffer.groups
    first = restored.groups[0]
    assert [(s.index, s.member, s.seed, s.version, s.reward) for s in first.samples] == [
        (50, 0, 0, 3, 0.5),
        (51, 1, 1, 3, None),
    ]
    assert first.prompt == prompt(5, 1)


def test_pictures_and_trajectories_are_let_go() -> None:
    given = group(5, 0.5)
    (kept,) = filled(given).groups
    assert kept.samples[0].media is kept.samples[0].trajectory is None
    assert given.samples[0].media is not None  # the rollout's own sample is untouched
