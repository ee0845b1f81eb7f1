"""Weighted sums of scores, failures masked or fatal."""

from __future__ import annotations

import math

import pytest

from drl.errors import BadInput, RewardError
from drl.stages.reward import assign_rewards, require_some, weighted_sum
from drl.testing import make_sample
from drl.types import Sample, Score


def only_a(sample: Sample) -> dict[str, float]:
    return {"a": 1.0}


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
    assign_rewards(samples, scores, only_a, on_failure="mask")
    assert [sample.reward for sample in samples] == [1.0, None]


def test_a_failure_stops_by_default_and_names_sample_and_option():
    with pytest.raises(RewardError, match=r"(?s)sample 7.*timeout.*reward.on_failure"):
        assign_rewards(
            [make_sample(index=7)],
            [{"a": Score(value=None, failure="timeout")}],
            only_a,
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


def test_scores_stay_with_their_samples_and_weigh_as_the_recipe_says():
    samples = [make_sample(index=n) for n in range(3)]
    scores = [{"a": Score(value=float(n)), "b": Score(value=10.0 * n)} for n in range(3)]
    assign_rewards(samples, scores, lambda sample: {"a": 1.0, "b": -0.5}, on_failure="error")
    assert [sample.reward for sample in samples] == [0.0, -4.0, -8.0]
    assert [sample.scores for sample in samples] == scores


@pytest.mark.parametrize("count", [0, 1, 3])
def test_more_or_fewer_scores_than_samples_are_a_mistake(count):
    with pytest.raises(ValueError):
        assign_rewards(
            [make_sample(), make_sample()],
            [{"a": Score(value=1.0)}] * count,
            only_a,
            on_failure="mask",
        )


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_score_is_a_failure_too_and_named_by_its_value(value):
    with pytest.raises(RewardError, match=rf"\{{'a': 'value {value}'\}}"):
        assign_rewards([make_sample()], [{"a": Score(value=value)}], only_a, on_failure="error")


def test_only_terms_that_count_are_blamed():
    terms = {
        "a": Score(value=None, failure="offline"),
        "b": Score(value=1.0),
        "c": Score(value=None, failure="never mind"),
    }
    with pytest.raises(RewardError) as failure:
        assign_rewards(
            [make_sample(index=3, group_index=8)],
            [terms],
            lambda sample: {"a": 1.0, "b": 1.0, "c": 0.0},
            on_failure="error",
        )
    assert str(failure.value).splitlines()[0] == (
        "sample 3 (prompt row 8) got no reward: {'a': 'offline'}"
    )


def test_no_samples_are_no_failure():
    require_some([], 0)
    assign_rewards([], [], only_a, on_failure="error")


def test_a_part_of_the_score_replaces_its_value() -> None:
    samples = [make_sample(index=n) for n in range(2)]
    scores = [{"a": Score(value=9.0, parts={"shape": 0.25 * n, "colour": 1.0})} for n in range(2)]
    assign_rewards(samples, scores, only_a, on_failure="error", key="shape")
    assert [sample.reward for sample in samples] == [0.0, 0.25]
    assert samples[1].scores["a"].value == 0.25
    assert samples[1].scores["a"].parts == {"shape": 0.25, "colour": 1.0}


def test_a_score_without_that_part_names_its_parts_and_the_option() -> None:
    scores = [{"a": Score(value=9.0, parts={"shape": 0.25, "colour": 1.0})}]
    with pytest.raises(BadInput, match=r"(?s)reward.key: .*'size'.*'shape', 'colour'.*reward.key"):
        assign_rewards([make_sample()], scores, only_a, on_failure="mask", key="size")
    with pytest.raises(BadInput, match="its parts: none"):
        assign_rewards(
            [make_sample()], [{"a": Score(value=9.0)}], only_a, on_failure="mask", key="size"
        )


def test_failed_scores_and_terms_that_do_not_count_need_no_part() -> None:
    samples = [make_sample(), make_sample()]
    parts = {"shape": 0.5}
    scores = [
        {"a": Score(value=None, failure="timeout"), "b": Score(value=7.0)},
        {"a": Score(value=9.0, parts=parts), "b": Score(value=7.0)},
    ]
    weights = {"a": 1.0, "b": 0.0}
    assign_rewards(samples, scores, lambda sample: weights, on_failure="mask", key="shape")
    assert [sample.reward for sample in samples] == [None, 0.5]
    assert samples[1].scores["b"].value == 7.0
