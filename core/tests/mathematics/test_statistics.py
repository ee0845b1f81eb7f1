"""Group statistics and the bootstrap interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drl.mathematics.statistics import (
    bootstrap_interval,
    group_mean,
    group_statistics,
    group_std,
)

NAN = math.nan


def test_mean_and_unbiased_std_by_hand() -> None:
    values = torch.tensor([1.0, 10.0, 3.0, 20.0, 5.0])
    ids, valid = torch.tensor([7, 2, 7, 2, 7]), torch.ones(5, dtype=torch.bool)
    assert group_mean(values, ids, valid).tolist() == [3.0, 15.0, 3.0, 15.0, 3.0]
    expected = [2.0, math.sqrt(50.0), 2.0, math.sqrt(50.0), 2.0]
    assert group_std(values, ids, valid).tolist() == pytest.approx(expected)


def test_invalid_values_are_masked_even_when_they_are_nan() -> None:
    values, ids = torch.tensor([1.0, NAN, 3.0]), torch.tensor([0, 0, 0])
    valid = torch.tensor([True, False, True])
    assert group_mean(values, ids, valid).tolist() == [2.0] * 3
    assert group_std(values, ids, valid).tolist() == pytest.approx([math.sqrt(2.0)] * 3)


def test_a_group_of_one_or_none_has_no_std() -> None:
    values, ids = torch.tensor([4.0, NAN, NAN]), torch.tensor([0, 0, 1])
    valid = torch.tensor([True, False, False])
    assert group_std(values, ids, valid).tolist() == [0.0] * 3
    assert group_mean(values, ids, valid).tolist() == [4.0, 4.0, 0.0]


def test_a_std_of_rounding_noise_is_zero_under_a_floor() -> None:
    values = torch.tensor([0.1 + 1e-8 * k for k in range(4)])
    ids, valid = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.bool)
    assert group_std(values, ids, valid)[0] > 0
    assert group_std(values, ids, valid, floor=1e-6).tolist() == [0.0] * 4


def test_groups_come_in_the_order_of_their_ids_with_sizes_and_counts() -> None:
    groups = group_statistics(
        torch.tensor([-5.0, 2.0, NAN]), torch.tensor([9, 4, 9]), torch.tensor([True, True, False])
    )
    assert groups.ids.tolist() == [4, 9]
    assert groups.sizes_Q.tolist() == [1, 2]
    assert groups.counts_Q.tolist() == [1, 1]
    assert groups.largest_Q.tolist() == [2.0, 5.0]


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100)), min_size=1, max_size=30))
def test_statistics_equal_numpys_group_by_group(rows: list[tuple[int, float]]) -> None:
    ids = torch.tensor([number for number, _ in rows])
    values = torch.tensor([value for _, value in rows], dtype=torch.float64)
    groups = group_statistics(values, ids, torch.ones(len(rows), dtype=torch.bool))
    for place, number in enumerate(groups.ids.tolist()):
        members = values[ids == number].numpy()
        assert float(groups.means_Q[place]) == pytest.approx(members.mean(), abs=1e-9)
        assert float(groups.biased_stds_Q[place]) == pytest.approx(members.std(), abs=1e-6)
        if len(members) > 1:
            assert float(groups.stds_Q[place]) == pytest.approx(members.std(ddof=1), abs=1e-6)


def word_scores(words: int, gain: float, seed: int = 0) -> tuple[dict, dict]:  # type: ignore[type-arg]
    random = np.random.default_rng(seed)
    before = {f"w{i}": random.uniform(0, 1, 4).tolist() for i in range(words)}
    noise = {word: random.normal(gain, 0.1, 4) for word in before}
    return before, {word: (np.array(before[word]) + noise[word]).tolist() for word in before}


def test_the_interval_holds_the_difference_and_excludes_zero_for_a_clear_gain() -> None:
    interval = bootstrap_interval(*word_scores(64, 0.1), seed=1)
    assert 0 < interval.low < interval.difference < interval.high
    assert interval.difference == pytest.approx(0.1, abs=0.02)
    # std of the mean of 256 differences of std 0.1, times 1.96 on both sides
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 0.1 / 16, rel=0.2)


def test_the_interval_of_no_change_contains_zero() -> None:
    before, _ = word_scores(32, 0.0)
    assert bootstrap_interval(before, before, seed=1) == (0.0, 0.0, 0.0)
    low, high = bootstrap_interval(*word_scores(32, 0.0), seed=1)[1:]
    assert low < 0 < high


def test_scores_of_one_word_are_not_taken_as_independent() -> None:
    """Four equal scores per word must not make the interval twice as narrow."""
    once = {f"w{i}": [float(i % 2)] for i in range(20)}
    four = {word: scores * 4 for word, scores in once.items()}
    zeros = {word: [0.0] * len(scores) for word, scores in once.items()}
    zeros4 = {word: [0.0] * len(scores) for word, scores in four.items()}
    assert bootstrap_interval(zeros, once, seed=3) == bootstrap_interval(zeros4, four, seed=3)


def test_the_same_seed_gives_the_same_interval() -> None:
    scores = word_scores(16, 0.05)
    assert bootstrap_interval(*scores, seed=5) == bootstrap_interval(*scores, seed=5)
    assert bootstrap_interval(*scores, seed=5) != bootstrap_interval(*scores, seed=6)


def test_a_higher_level_is_wider() -> None:
    scores = word_scores(16, 0.05)
    narrow = bootstrap_interval(*scores, seed=5, level=0.5)
    wide = bootstrap_interval(*scores, seed=5, level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_words_of_unequal_counts_weigh_by_their_scores() -> None:
    before, after = {"a": [0.0], "b": [0.0, 0.0, 0.0]}, {"a": [1.0], "b": [0.0, 0.0, 0.0]}
    assert bootstrap_interval(before, after, seed=0).difference == 0.25


def test_unpaired_scores_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'b'"):
        bootstrap_interval({"a": [1.0], "b": [1.0]}, {"a": [1.0], "b": [1.0, 2.0]}, seed=0)
    with pytest.raises(ValueError, match="no scores"):
        bootstrap_interval({}, {}, seed=0)


def test_words_without_scores_count_for_nothing_and_alone_are_no_scores() -> None:
    before, after = {"a": [1.0, 2.0], "b": []}, {"a": [2.0, 4.0], "b": []}
    without = bootstrap_interval({"a": [1.0, 2.0]}, {"a": [2.0, 4.0]}, seed=0)
    assert bootstrap_interval(before, after, seed=0) == without
    with pytest.raises(ValueError, match=r"^no scores to compare$"):
        bootstrap_interval({"a": [], "b": []}, {"a": [], "b": []}, seed=0)


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_word_on_one_side_alone_is_named_and_not_more_than_five(side: str) -> None:
    many = {f"w{number}": [1.0] for number in range(9, 0, -1)}
    scores = (many, {"w1": [1.0]}) if side == "before" else ({"w1": [1.0]}, many)
    named = r"differ in \['w2', 'w3', 'w4', 'w5', 'w6'\]$"
    with pytest.raises(ValueError, match=named):
        bootstrap_interval(*scores, seed=0)


def test_the_order_in_which_words_come_does_not_matter() -> None:
    before, after = word_scores(12, 0.05)
    turned = ({word: scores[word] for word in reversed(scores)} for scores in (before, after))
    assert bootstrap_interval(*turned, seed=2) == bootstrap_interval(before, after, seed=2)


def test_the_interval_is_the_quantiles_of_the_drawn_means_by_hand() -> None:
    before, after = {"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [0.0]}
    low, high = bootstrap_interval(before, after, seed=0)[1:]
    assert (low, high) == (0.0, 1.0)  # both words drawn twice happens in one draw of four
    low, high = bootstrap_interval(before, after, seed=0, level=0.4)[1:]
    assert (low, high) == (0.5, 0.5)


def test_a_std_at_its_floor_is_noise_and_one_above_it_is_not() -> None:
    values, ids = torch.tensor([1.0, 3.0]), torch.zeros(2, dtype=torch.int64)
    valid = torch.ones(2, dtype=torch.bool)
    exact = float(torch.tensor([1.0, 3.0], dtype=torch.float64).std()) / 3.0
    for floor, expected in [(exact * 1.0001, 0.0), (exact * 0.9999, 2.0**0.5), (0.0, 2.0**0.5)]:
        found = group_std(values, ids, valid, floor=floor)
        assert found.tolist() == pytest.approx([expected] * 2)
