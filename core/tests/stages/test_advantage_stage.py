"""Groups by id whatever the order, and figures of raw rewards."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from drl.errors import ContractError
from drl.stages.advantage import estimate, grouped_rewards, identical_samples, reward_metrics
from drl.testing import make_prompt, make_sample
from drl.types import Advantages, Group, Rollout, Score


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


NO_TERMS = SimpleNamespace(weights={})


class Answers:
    """An estimator that gives what a test wants, whatever it is asked."""

    def __init__(self, values):
        self.values = values

    def advantages(self, rewards):
        return Advantages(values=self.values)


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(2),
        torch.zeros(3, 1),
        torch.tensor([0.0, math.nan, 0.0]),
        torch.tensor([0.0, math.inf, 0.0]),
    ],
)
def test_an_estimator_must_give_one_finite_value_per_sample(values):
    run = SimpleNamespace(advantage=Answers(values), rewards=NO_TERMS, functions={})
    with pytest.raises(
        ContractError, match=r"Answers must return one finite value per sample \(\(3,"
    ):
        estimate(run, rollout({0: [1.0, 2.0, None]}))


def test_sound_advantages_are_passed_on_and_losses_without_rewards_get_none():
    values = torch.tensor([1.0, -1.0])
    run = SimpleNamespace(advantage=Answers(values), rewards=NO_TERMS, functions={})
    made = estimate(run, rollout({0: [1.0, 2.0]}))
    assert made.values is values
    assert estimate(SimpleNamespace(advantage=None), rollout({0: [1.0]})) is None


def test_terms_that_count_travel_with_their_weights_and_names():
    made = rollout({5: [1.0, None], 2: [3.0]})
    first, failed, other = made.samples
    first.scores = {"ocr": Score(value=0.25), "jpeg": Score(value=-2.0), "seen": Score(value=7.0)}
    failed.scores = {"ocr": Score(value=None, failure="x"), "jpeg": Score(value=4.0)}
    other.scores = {"jpeg": Score(value=1.0)}
    grouped = grouped_rewards(made, {"jpeg": -0.5, "seen": 0.0, "ocr": 2.0})
    assert grouped.names == ("jpeg", "ocr")
    assert grouped.weights == (-0.5, 2.0)
    assert grouped.terms.nan_to_num(9.0).tolist() == [[-2.0, 0.25], [4.0, 9.0], [1.0, 9.0]]
    assert grouped.rewards.nan_to_num(9.0).tolist() == [1.0, 9.0, 3.0]
    assert grouped_rewards(made).terms is None
    assert grouped_rewards(made, {"seen": 0.0}).terms is None


def test_an_estimator_gets_the_terms_of_the_run():
    class Keeps(Answers):
        def advantages(self, rewards):
            self.seen = rewards
            return super().advantages(rewards)

    estimator = Keeps(torch.zeros(2))
    weights = {"ocr": 0.5}
    run = SimpleNamespace(
        advantage=estimator, rewards=SimpleNamespace(weights=weights), functions={}
    )
    estimate(run, rollout({0: [1.0, 2.0]}))
    assert estimator.seen.terms.tolist() == [[1.0], [2.0]]
    assert (estimator.seen.weights, estimator.seen.names) == ((0.5,), ("ocr",))


def test_a_removed_sample_still_counts_for_its_group():
    made = rollout({0: [1.0, 3.0]})
    made.groups[0].samples[0].removed = True
    assert grouped_rewards(made).valid.tolist() == [True, True]


def test_figures_of_the_rewards_by_hand():
    figures = reward_metrics(rollout({0: [1.0, 2.0, 4.0], 1: [9.0, None]}))
    assert figures["rollout/reward/raw_min"] == 1.0
    assert figures["rollout/reward/raw_max"] == 9.0
    assert figures["rollout/reward/raw_median"] == 2.0  # the lower of the two in the middle
    assert figures["rollout/reward/raw_num_samples"] == 4.0
    assert figures["rollout/reward/raw_std"] == pytest.approx(38.0**0.5 / 2)
    assert figures["rollout/identical_samples"] == 3.0


def test_the_mean_of_a_term_is_over_its_scores_alone():
    made = rollout({0: [1.0, 3.0, 5.0]})
    first, second, third = made.groups[0].samples
    first.scores = {"ocr": Score(value=1.0), "jpeg": Score(value=-2.0)}
    second.scores = {"ocr": Score(value=None, failure="x"), "jpeg": Score(value=math.inf)}
    third.scores = {"ocr": Score(value=math.nan)}
    figures = reward_metrics(made)
    assert figures["rollout/reward/ocr_mean"] == 1.0
    assert figures["rollout/reward/jpeg_mean"] == -2.0
    names = [name for name in figures if name.endswith(("ocr_mean", "jpeg_mean"))]
    assert names == ["rollout/reward/jpeg_mean", "rollout/reward/ocr_mean"]


def test_a_term_nobody_could_score_has_no_mean():
    made = rollout({0: [1.0]})
    made.groups[0].samples[0].scores = {"ocr": Score(value=None, failure="x")}
    assert "rollout/reward/ocr_mean" not in reward_metrics(made)


def test_pictures_that_are_absent_are_not_identical():
    made = rollout({0: [1.0, 1.0, 1.0]})
    for sample in made.groups[0].samples[:2]:
        sample.media = None
    assert identical_samples(made) == 0
