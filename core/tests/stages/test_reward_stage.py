"""Weighted sums of scores, failures masked or fatal."""

from __future__ import annotations

import math

import pytest

from drl.errors import RewardError
from drl.stages.reward import assign_rewards, require_some, weighted_sum
from drl.testing import make_sample
from drl.types import Score


def test_reward_is_the_weighted_sum_of_its_terms():
    terms = {"a": Score(value=2.0), "b": Score(value=-1.0)}
    assert weighted_sum(terms, {"a": 0.5, "b": 2.0}) == -1.0


def test_a_term_of_weight_0_is_logged_but_never_counts():
    terms = {"a": Score(value=2.0), "b": Score(value=None, failure="offline")}
    assert weighted_sum(terms, {"a": 1.0, "b": 0.0}) == 2.0


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_failed_term_leaves_no_reward(value):
    assert weighted_sum({"a": Score(value=value)}, {"a": 1.0}) is None


def test_masked_failures_keep_the_other_samples():
    samples = [make_sample(index=n) for n in range(2)]
    scores = [{"a": Score(value=1.0)}, {"a": Score(value=None, failure="timeout")}]
    assign_rewards(samples, scores, {"a": 1.0}, on_failure="mask")
    assert [sample.reward for sample in samples] == [1.0, None]


def test_a_failure_stops_by_default_and_names_sample_and_option():
    with pytest.raises(RewardError, match=r"(?s)sample 7.*timeout.*reward.on_failure"):
        assign_rewards(
            [make_sample(index=7)],
            [{"a": Score(value=None, failure="timeout")}],
            {"a": 1.0},
            on_failure="error",
        )


def test_a_rollout_without_one_reward_always_stops():
    samples = [make_sample(index=n) for n in range(3)]
    for sample in samples:
        sample.scores = {"a": Score(value=None, failure="server gone")}
    with pytest.raises(RewardError, match="server gone"):
        require_some(samples, 4)
    samples[1].reward = 0.0
    require_some(samples, 4)
