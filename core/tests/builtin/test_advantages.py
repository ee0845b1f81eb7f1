"""``grpo``: contract, golden numbers, switches, and the known faults of group normalisation."""

from __future__ import annotations

import itertools
import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drl.builtin.advantage_grpo import Grpo
from drl.builtin.config_advantages import GrpoOptions
from drl.testing.contracts.advantage import AdvantageContract, grouped, values
from drl.testing.golden import load_golden
from drl.types import Advantages, Context

NAN = math.nan
ROOT2 = math.sqrt(2.0)


class TestGrpoContract(AdvantageContract):
    component = ("advantage", "grpo")

    @pytest.fixture
    def table(self) -> list[tuple[list[float], list[int], list[float]]]:
        unit = 1 / (1 + 1e-4)
        pair = 1 / (ROOT2 + 1e-4)
        return [
            ([1.0, 2.0, 3.0], [0, 0, 0], [-unit, 0.0, unit]),
            ([1.0, NAN, 3.0], [0, 0, 0], [-pair, 0.0, pair]),
            (
                [1.0, 10.0, 3.0, 14.0],
                [0, 1, 0, 1],
                [-pair, -2 / (2 * ROOT2 + 1e-4), pair, 2 / (2 * ROOT2 + 1e-4)],
            ),
        ]


class TestGrpoWithoutStdContract(AdvantageContract):
    component = ("advantage", "grpo")

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"std_normalization": False}

    @pytest.fixture
    def table(self) -> list[tuple[list[float], list[int], list[float]]]:
        return [([1.0, NAN, 3.0, 8.0], [0, 0, 0, 1], [-1.0, 0.0, 1.0, 0.0])]


def grpo(**options: Any) -> Grpo:
    return Grpo(GrpoOptions(**options), Context(section=SimpleNamespace()))


def of_groups(rewards: list[float], size: int, **options: Any) -> Advantages:
    ids = [place // size for place in range(len(rewards))]
    return grpo(**options).advantages(grouped(rewards, ids))


@pytest.mark.parametrize("place", range(32))
def test_golden_advantages_of_miles(place: int) -> None:
    """With floor 0; n = 1 has its normalisation off there before the function is called."""
    case = load_golden("advantages")["miles"][place]
    size = case["n_samples_per_prompt"]
    switches = {
        "std_normalization": case["std_normalization"],
        "globalize_mean": case["globalize_reward_mean"],
        "globalize_std": case["globalize_reward_std"],
    }
    got = of_groups(case["rewards"], size, std_floor=0.0, **switches).values
    if size == 1:
        switches["std_normalization"] = False
        case = next(
            c
            for c in load_golden("advantages")["miles"]
            if c["set"] == case["set"]
            and not c["std_normalization"]
            and c["globalize_reward_mean"] is switches["globalize_mean"]
        )
    assert got.tolist() == pytest.approx(case["miles_advantages"], rel=1e-6, abs=2e-7)


@pytest.mark.parametrize("globalize_std", [False, True])
@pytest.mark.parametrize("std_normalization", [False, True])
def test_one_sample_per_prompt_gives_zeros(globalize_std: bool, std_normalization: bool) -> None:
    result = of_groups(
        [0.1, 0.9, 0.4], 1, globalize_std=globalize_std, std_normalization=std_normalization
    )
    assert result.values.tolist() == [0.0] * 3
    assert result.statistics["rollout/informative_groups"] == 0.0


def test_uneven_groups_with_constant_rewards_give_zeros() -> None:
    """Sizes 4, 3, 4: a reshape would mix them."""
    rewards = [1.0] * 4 + [5.0] * 3 + [9.0] * 4
    ids = [0] * 4 + [1] * 3 + [2] * 4
    assert values(grpo(), rewards, ids).tolist() == [0.0] * 11


def test_nearly_equal_rewards_are_rounding_noise() -> None:
    rewards = [0.1 + k * 1e-9 for k in range(4)]
    assert max(map(abs, of_groups(rewards, 4).values.tolist())) == 0.0
    assert max(map(abs, of_groups([1e4 + k * 1e-3 for k in range(4)], 4).values.tolist())) == 0.0


def test_small_rewards_with_real_spread_are_not_noise() -> None:
    assert of_groups([0.0, 1e-5, 2e-5, 4e-5], 4).values.abs().max() > 0.1


def test_a_floor_bounds_the_pair_of_switches_that_divides_by_almost_nothing() -> None:
    """Global mean with the group's std: a group without spread would get (r - mean) / 1e-4."""
    rewards = [2.0, 2.0, 0.0, 1.0]
    wild = of_groups(rewards, 2, globalize_mean=True, std_floor=0.0).values
    assert float(wild[0]) == pytest.approx(0.75e4, rel=1e-5)
    assert of_groups(rewards, 2, globalize_mean=True).values[:2].tolist() == [0.0, 0.0]


def test_global_switches_by_hand() -> None:
    rewards = [0.0, 2.0, 4.0, 10.0]
    std = math.sqrt(sum((r - 4.0) ** 2 for r in rewards) / 3)
    centered = of_groups(rewards, 2, globalize_mean=True, std_normalization=False).values
    assert centered.tolist() == [-4.0, -2.0, 0.0, 6.0]
    scaled = of_groups(rewards, 2, globalize_std=True).values
    assert scaled.tolist() == pytest.approx([x / (std + 1e-4) for x in (-1.0, 1.0, -3.0, 3.0)])
    both = of_groups(rewards, 2, globalize_std=True, globalize_mean=True).values
    assert both.tolist() == pytest.approx([x / (std + 1e-4) for x in (-4.0, -2.0, 0.0, 6.0)])


@pytest.mark.parametrize(
    ("globalize_mean", "globalize_std", "std_normalization"),
    list(itertools.product([False, True], repeat=3)),
)
def test_no_switch_lets_nan_through(
    globalize_mean: bool, globalize_std: bool, std_normalization: bool
) -> None:
    rewards = [1.0, NAN, 3.0, NAN, NAN, 2.0, NAN, math.inf, 5.0, 5.0]
    result = grpo(
        globalize_mean=globalize_mean,
        globalize_std=globalize_std,
        std_normalization=std_normalization,
    ).advantages(grouped(rewards, [0, 0, 0, 1, 1, 2, 2, 3, 4, 4]))
    assert torch.isfinite(result.values).all()
    assert result.values[[1, 3, 4, 6, 7]].tolist() == [0.0] * 5


def test_an_invalid_reward_is_masked_whatever_number_it_holds() -> None:
    rewards = grouped([1.0, 100.0, 3.0], [0, 0, 0])
    rewards.valid[1] = False
    assert (
        grpo().advantages(rewards).values.tolist()
        == values(grpo(), [1.0, NAN, 3.0], [0] * 3).tolist()
    )


def test_repeating_samples_over_timesteps_is_not_done_before_the_statistics() -> None:
    """Ten copies of every reward would shrink the unbiased std."""
    once = of_groups([0.0, 1.0], 2).values
    tenfold = of_groups([0.0] * 10 + [1.0] * 10, 20).values
    assert float(once[1]) == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4))
    assert float(tenfold[-1]) > float(once[1])


def test_statistics_by_hand() -> None:
    figures = of_groups([0.0, 2.0, 0.04, 0.04, 1.0, 1.0, 0.0, 0.0], 2).statistics
    assert figures == {
        "rollout/reward/group_mean_avg": pytest.approx((1.0 + 0.04 + 1.0 + 0.0) / 4),
        "rollout/reward/group_std_avg": pytest.approx(0.25),
        "rollout/informative_groups": 0.25,
        "rollout/zero_std/count_0.0": 2.0,
        "rollout/zero_std/count_1.0": 1.0,
    }


def test_all_zero_rewards_have_no_informative_group() -> None:
    figures = of_groups([0.0] * 12, 4).statistics
    assert figures["rollout/informative_groups"] == 0.0
    assert figures["rollout/zero_std/count_0.0"] == 3.0


def test_a_rollout_without_a_valid_reward_reports_no_average() -> None:
    result = of_groups([NAN] * 4, 2)
    assert result.statistics == {"rollout/informative_groups": 0.0}
    assert result.values.tolist() == [0.0] * 4


def test_a_negative_mean_near_zero_shares_the_key_of_zero() -> None:
    figures = of_groups([-0.01, -0.01, 0.01, 0.01], 2).statistics
    assert figures["rollout/zero_std/count_0.0"] == 2.0


rewards_of_groups = st.lists(
    st.lists(st.integers(-8, 8).map(lambda n: n / 4) | st.none(), min_size=1, max_size=5),
    min_size=1,
    max_size=4,
)


def by_hand(
    groups: list[list[float | None]], *, global_mean: bool, global_std: bool, normalize: bool
) -> list[float]:
    """The definition in plain Python: mean, unbiased deviation, 1e-4, and where there is no spread."""
    known = [[reward for reward in group if reward is not None] for group in groups]
    everything = [reward for group in known for reward in group]
    companies = any(len(group) > 1 for group in groups)
    found = []
    for group, scores in zip(groups, known, strict=True):
        centre = everything if global_mean else scores
        spread = everything if global_std else scores
        deviation = statistics.stdev(spread) if len(spread) > 1 else 0.0
        for reward in group:
            if reward is None:
                found.append(0.0)
                continue
            value = reward - statistics.fmean(centre)
            if normalize and companies:
                value = value / (deviation + 1e-4) if deviation > 1e-6 else 0.0
            found.append(value)
    return found


@settings(max_examples=150, deadline=None)
@given(rewards_of_groups, st.booleans(), st.booleans(), st.booleans())
def test_every_switch_is_its_definition_on_uneven_groups(
    groups: list[list[float | None]], mean: bool, std: bool, normalize: bool
) -> None:
    flat = [NAN if reward is None else reward for group in groups for reward in group]
    ids = [7 * place for place, group in enumerate(groups) for _ in group]
    switches = {"globalize_mean": mean, "globalize_std": std, "std_normalization": normalize}
    found = grpo(**switches).advantages(grouped(flat, ids))
    expected = by_hand(groups, global_mean=mean, global_std=std, normalize=normalize)
    assert found.values.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_key_of_a_group_without_spread_is_its_mean_to_one_digit() -> None:
    figures = of_groups([0.26, 0.26, 0.34, 0.34, 1.0, 1.0, 0.0, 1.0], 2).statistics
    assert figures["rollout/zero_std/count_0.3"] == 2.0
    assert figures["rollout/zero_std/count_1.0"] == 1.0
    assert figures["rollout/informative_groups"] == 0.25
    single = grpo().advantages(grouped([5.0, 1.0, 2.0], [0, 1, 1])).statistics
    assert not [key for key in single if "zero_std" in key]  # one sample has no spread to lack


def test_informative_groups_are_a_share_of_all_groups_failed_ones_too() -> None:
    figures = grpo().advantages(grouped([0.0, 1.0, NAN, NAN], [0, 0, 1, 1])).statistics
    assert figures["rollout/informative_groups"] == 0.5
    assert figures["rollout/reward/group_mean_avg"] == 0.5
