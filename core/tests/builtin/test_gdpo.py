"""``gdpo``: contract, the formula by hand, and what scales, shifts, orders and uneven groups may change."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drl.builtin.advantage_gdpo import Gdpo
from drl.builtin.advantage_grpo import Grpo
from drl.builtin.config_advantages import GdpoOptions, GrpoOptions
from drl.errors import BadInput, ContractError
from drl.testing.contracts.advantage import AdvantageContract, grouped
from drl.types import Context, GroupedRewards

NAN = math.nan
ROOT2 = math.sqrt(2.0)
EPSILON = 1e-4


class TestGdpoContract(AdvantageContract):
    component = ("advantage", "gdpo")

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"batch_normalization": False}

    @pytest.fixture
    def table(self) -> list[tuple[list[float], list[int], list[float]]]:
        pair = 1 / (ROOT2 + EPSILON)
        return [
            ([1.0, NAN, 3.0], [0, 0, 0], [-pair, 0.0, pair]),
            (
                [1.0, 10.0, 3.0, 14.0],
                [0, 1, 0, 1],
                [-pair, -2 / (2 * ROOT2 + EPSILON), pair, 2 / (2 * ROOT2 + EPSILON)],
            ),
        ]


class TestGdpoOverTheBatchContract(AdvantageContract):
    component = ("advantage", "gdpo")

    @pytest.fixture
    def table(self) -> list[tuple[list[float], list[int], list[float]]]:
        """One group of +-a: the std over the rollout of [-a, 0, a] is a."""
        unit = 1 / (1 + EPSILON)
        return [
            ([1.0, 2.0, 3.0], [0, 0, 0], [-unit / (unit + EPSILON), 0, unit / (unit + EPSILON)])
        ]


def gdpo(**options: Any) -> Gdpo:
    return Gdpo(GdpoOptions(**options), Context())


def of_terms(
    columns: Mapping[str, Sequence[float]],
    ids: Sequence[int],
    weights: Sequence[float] | None = None,
) -> GroupedRewards:
    """Rewards of several terms; a sample whose term that counts is NaN has no reward."""
    factors = tuple(weights or [1.0] * len(columns))
    terms_NK = torch.tensor(list(columns.values()), dtype=torch.float32).T
    total_N = (terms_NK * torch.tensor(factors)).sum(1)
    return replace(
        grouped(total_N.tolist(), ids), terms=terms_NK, weights=factors, names=tuple(columns)
    )


def plain(rewards: GroupedRewards, **options: Any) -> list[float]:
    return gdpo(batch_normalization=False, **options).advantages(rewards).values.tolist()


def test_the_formula_by_hand() -> None:
    """Two terms, two groups of two: std of a pair of distance d is d / sqrt(2)."""
    rewards = of_terms(
        {"ocr": [0.0, 1.0, 0.0, 0.0], "jpeg": [30.0, 10.0, 0.0, 40.0]}, [0, 0, 1, 1], [1.0, 0.5]
    )

    def half(distance: float) -> float:
        return distance / 2 / (distance / ROOT2 + EPSILON)

    first = half(1) - 0.5 * half(20)
    second = 0.5 * half(40)
    expected = [-first, first, -second, second]
    assert plain(rewards) == pytest.approx(expected, rel=1e-5)
    deviation = math.sqrt(2 * (first**2 + second**2) / 3)
    whole = gdpo().advantages(rewards).values.tolist()
    assert whole == pytest.approx([a / (deviation + EPSILON) for a in expected], rel=1e-5)


def test_a_large_term_does_not_hide_a_small_one() -> None:
    """The case that the method is for: a score in thousands beside one in [0, 1]."""
    columns = {"small": [0.0, 1.0, 0.0, 1.0], "large": [0.0, 0.0, 5000.0, 5000.0]}
    rewards = of_terms(columns, [0] * 4)
    summed = Grpo(GrpoOptions(), Context()).advantages(rewards).values.tolist()
    assert summed[1] - summed[0] < 1e-3 < summed[2] - summed[0]
    low, small, large, both = gdpo().advantages(rewards).values.tolist()
    assert small == pytest.approx(large, abs=1e-3)
    assert low < small < both
    assert small == pytest.approx(0.0, abs=1e-3)


def test_combinations_of_equal_sums_keep_their_difference() -> None:
    """grpo sees two classes of a sum here; the rarer success is worth more after normalisation."""
    columns = {"easy": [1.0, 1.0, 1.0, 0.0], "hard": [0.0, 0.0, 0.0, 1.0]}
    rewards = of_terms(columns, [0] * 4)
    summed = Grpo(GrpoOptions(), Context()).advantages(rewards).values.tolist()
    assert summed == [0.0] * 4
    assert len(set(plain(of_terms(columns, [0] * 4, [1.0, 2.0])))) == 2
    assert gdpo().advantages(rewards).statistics["rollout/informative_groups"] == 1.0


def test_one_term_is_grpo_without_the_batch_step_whatever_its_weight() -> None:
    scores, ids = [0.0, 0.25, 1.0, 0.5, 2.0, NAN], [0, 0, 0, 1, 1, 1]
    expected = Grpo(GrpoOptions(), Context()).advantages(grouped(scores, ids)).values.tolist()
    assert plain(of_terms({"ocr": scores}, ids)) == pytest.approx(expected, rel=1e-6)
    assert plain(grouped(scores, ids)) == pytest.approx(expected, rel=1e-6)
    doubled = plain(of_terms({"ocr": scores}, ids, [2.0]))
    assert doubled == pytest.approx([2 * value for value in expected], rel=1e-6)


def test_more_terms_are_not_larger_steps() -> None:
    scores, ids = [0.0, 1.0, 3.0, 2.0, 2.5, 1.0], [0, 0, 0, 1, 1, 1]
    one = gdpo().advantages(of_terms({"a": scores}, ids)).values
    many = gdpo().advantages(of_terms(dict.fromkeys("abcd", scores), ids)).values
    assert torch.allclose(one, many, atol=1e-3)
    assert float(many.std()) == pytest.approx(1.0, abs=1e-3)
    raised = torch.tensor(plain(of_terms(dict.fromkeys("abcd", scores), ids)))
    assert torch.allclose(raised, 4 * torch.tensor(plain(of_terms({"a": scores}, ids))), atol=1e-5)


def test_a_term_without_spread_in_a_group_adds_nothing_there() -> None:
    ids = [0, 0, 1, 1]
    both = of_terms({"a": [0.0, 1.0, 0.0, 1.0], "b": [7.0, 7.0, 0.0, 5.0]}, ids)
    alone = of_terms({"a": [0.0, 1.0, 0.0, 1.0]}, ids)
    assert plain(both)[:2] == plain(alone)[:2]
    assert plain(both)[3] == pytest.approx(2 * plain(alone)[3], rel=1e-3)


def test_rounding_noise_of_a_term_is_not_spread() -> None:
    noisy = of_terms({"a": [0.0, 1.0], "b": [1e4, 1e4 + 1e-3]}, [0, 0])
    assert plain(noisy) == plain(of_terms({"a": [0.0, 1.0]}, [0, 0]))
    assert plain(noisy, std_floor=0.0)[1] > plain(noisy)[1]


def test_a_failed_sample_leaves_every_term() -> None:
    failed = of_terms({"a": [0.0, 9.0, 1.0], "b": [5.0, NAN, 2.0]}, [0, 0, 0])
    assert failed.valid.tolist() == [True, False, True]
    without = of_terms({"a": [0.0, 1.0], "b": [5.0, 2.0]}, [0, 0])
    found = plain(failed)
    assert found[1] == 0.0
    assert [found[0], found[2]] == plain(without)


def test_a_term_that_a_sample_lacks_is_left_out_of_it_alone() -> None:
    """Rows may be scored by other terms: their reward is there, one column is not."""
    made = of_terms({"a": [0.0, 1.0, 2.0], "b": [3.0, 1.0, 0.0]}, [0, 0, 0])
    assert made.terms is not None
    made.terms[2, 1] = NAN
    a = plain(of_terms({"a": [0.0, 1.0, 2.0]}, [0, 0, 0]))
    b = plain(of_terms({"b": [3.0, 1.0]}, [0, 0]))
    assert plain(made) == pytest.approx([a[0] + b[0], a[1] + b[1], a[2]], rel=1e-6)


def test_a_reward_without_any_of_the_terms_is_refused_not_taken_for_0() -> None:
    made = of_terms({"a": [0.0, 1.0], "b": [3.0, 1.0]}, [0, 0])
    assert made.terms is not None
    made.terms[1] = NAN
    with pytest.raises(BadInput, match=r"no score of the terms that count \('a', 'b'\).*rm_type"):
        gdpo().advantages(made)
    made.valid[1] = False
    assert plain(made) == [0.0, 0.0]


def test_figures_name_the_share_of_groups_in_which_a_term_says_something() -> None:
    rewards = of_terms({"a": [0.0, 1.0, 2.0, 2.0], "b": [1.0, 1.0, 1.0, 1.0]}, [4, 4, 9, 9])
    figures = gdpo().advantages(rewards).statistics
    assert figures["rollout/informative_groups"] == 0.5
    assert figures["rollout/informative_groups/a"] == 0.5
    assert figures["rollout/informative_groups/b"] == 0.0
    assert figures["rollout/zero_std/count_3.0"] == 1.0
    assert figures["rollout/reward/group_mean_avg"] == pytest.approx((1.5 + 3.0) / 2)


def test_terms_and_weights_that_differ_in_number_are_refused() -> None:
    rewards = replace(of_terms({"a": [0.0, 1.0], "b": [0.0, 1.0]}, [0, 0]), weights=(1.0,))
    with pytest.raises(ContractError, match=r"must be \(samples, terms\) = \(2, 1\), got \(2, 2\)"):
        gdpo().advantages(rewards)


rows = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(-8, 8).map(lambda n: n / 4) | st.none(),
        st.integers(-8, 8).map(lambda n: n / 4),
    ),
    min_size=1,
    max_size=12,
)


def columns_of(table: Sequence[tuple[int, float | None, float]]) -> dict[str, list[float]]:
    return {
        "a": [NAN if a is None else a for _, a, _ in table],
        "b": [b for _, _, b in table],
    }


@settings(max_examples=100, deadline=None)
@given(rows, st.sampled_from([1.0, 0.5, -2.0]))
def test_it_is_its_definition_on_uneven_groups(
    table: list[tuple[int, float | None, float]], weight: float
) -> None:
    found = gdpo().advantages(
        of_terms(columns_of(table), [number for number, _, _ in table], [1.0, weight])
    )
    sums: list[float | None] = []
    for number, a, b in table:
        if a is None:
            sums.append(None)
            continue
        mates = [(x, y) for other, x, y in table if other == number and x is not None]
        total = 0.0
        for value, column, factor in (
            (a, [x for x, _ in mates], 1.0),
            (b, [y for _, y in mates], weight),
        ):
            spread = statistics.stdev(column) if len(column) > 1 else 0.0
            if spread > 1e-6 * max(map(abs, column)):
                total += factor * (value - statistics.fmean(column)) / (spread + EPSILON)
        sums.append(total)
    scored = [value for value in sums if value is not None]
    deviation = statistics.stdev(scored) if len(scored) > 1 else 0.0
    # the mean that the paper subtracts is 0
    assert statistics.fmean(scored or [0.0]) == pytest.approx(0.0, abs=1e-9)
    expected = [0.0 if value is None else value / (deviation + EPSILON) for value in sums]
    assert found.values.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(rows, st.floats(-50, 50), st.integers(0, 12), st.randoms(use_true_random=False))
def test_shift_scale_and_order_of_samples_change_nothing(
    table: list[tuple[int, float | None, float]], shift: float, power: int, random: Any
) -> None:
    columns, ids = columns_of(table), [number for number, _, _ in table]
    straight = torch.tensor(plain(of_terms(columns, ids)))
    # spreads are 0.17 and more, so that the 1e-4 beside them hardly counts
    scaled = columns | {"b": [round(shift) + b * 2.0**power for b in columns["b"]]}
    moved = torch.tensor(plain(of_terms(scaled, ids), std_floor=0.0))
    assert torch.allclose(straight, moved, atol=5e-3)
    order = list(range(len(table)))
    random.shuffle(order)
    shuffled = of_terms(
        {name: [column[place] for place in order] for name, column in columns.items()},
        [100 - 7 * ids[place] for place in order],
    )
    assert torch.allclose(straight[order], torch.tensor(plain(shuffled)), atol=1e-5)
