"""Groups by id whatever the order, and figures of raw rewards."""

from __future__ import annotations

import math

import pytest

from drl.stages.advantage import grouped_rewards, identical_samples, reward_metrics
from drl.testing import make_prompt, make_sample
from drl.types import Group, Rollout, Score


def rollout(rewards_by_group, dropped=None):
    groups = []
    for group_index, rewards in rewards_by_group.items():
        samples = [
            make_sample(index=10 * group_index + n, group_index=group_index, reward=r)
            for n, r in enumerate(rewards)
        ]
        for sample in samples:
            sample.scores = {"ocr": Score(value=sample.reward)}
        groups.append(Group(group_index=group_index, prompt=make_prompt(), samples=samples))
    return Rollout(rollout_id=0, version=0, groups=groups, dropped=dropped or {})


def test_groups_keep_their_ids_and_failures_are_masked():
    grouped = grouped_rewards(rollout({5: [1.0, None], 2: [3.0]}))
    assert grouped.group_ids.tolist() == [5, 5, 2]
    assert grouped.valid.tolist() == [True, False, True]
    assert math.isnan(grouped.rewards[1].item())


def test_figures_count_only_samples_with_a_reward():
    figures = reward_metrics(rollout({0: [1.0, 3.0, None]}, {"zero_std": 2}))
    assert figures["rollout/reward/raw_mean"] == 2.0
    assert figures["rollout/reward/raw_std"] == 1.0
    assert figures["rollout/reward/failed"] == 1.0
    assert figures["rollout/reward/ocr_mean"] == pytest.approx(2.0)
    assert figures["rollout/dynamic_filter/drop_zero_std"] == 2.0


def test_a_rollout_without_rewards_has_no_figures():
    assert reward_metrics(rollout({0: [None]})) == {}


def test_identical_samples_within_a_group_are_counted():
    made = rollout({0: [1.0, 2.0, 3.0], 1: [1.0, 2.0]})
    samples = made.groups[0].samples
    for number, sample in enumerate(samples):
        sample.media = make_sample(seed=number).media
    for sample in made.groups[1].samples:
        sample.media = make_sample(seed=0).media  # the same in another group is no alarm
    made.groups[1].samples[1].media = make_sample(seed=5).media
    assert identical_samples(made) == 0
    samples[2].media = samples[0].media
    assert identical_samples(made) == 1
