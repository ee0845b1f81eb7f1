"""``AdvantageContract``: what every advantage estimator keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.interfaces.advantage import AdvantageEstimator
from drl.testing.contracts.base import ContractBase
from drl.types import GroupedRewards

NAN = math.nan


class AdvantageContract(ContractBase):
    """Groups go by id, failed samples are masked, and nothing becomes NaN.

    The author overrides ``table``: rows of (rewards, group ids, expected), worked by hand. Capability
    ``shift``: False when adding a constant to all rewards changes the advantages.
    """

    @pytest.fixture
    def section(self) -> Any:
        """Core's options of ``[algorithm]``."""
        return SimpleNamespace(kl_beta=0.0, adv_clip_max=5.0)

    @pytest.fixture
    def table(self) -> list[tuple[list[float], list[int], list[float]]]:
        """Rewards, group ids and the advantages they must get; NaN marks a failed sample."""
        raise NotImplementedError(f"{type(self).__name__} must give the fixture table")

    def test_matches_the_table_worked_by_hand(
        self,
        instance: AdvantageEstimator,
        table: list[tuple[list[float], list[int], list[float]]],
    ) -> None:
        for rewards, ids, expected in table:
            assert values(instance, rewards, ids).tolist() == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("reward", [0.0, 0.1, -3.0, 1e6])
    def test_equal_rewards_give_zeros(self, instance: AdvantageEstimator, reward: float) -> None:
        assert values(instance, [reward] * 7, [0, 0, 0, 1, 1, 1, 1]).tolist() == [0.0] * 7

    def test_failed_samples_get_zero_and_change_nobody(self, instance: AdvantageEstimator) -> None:
        with_failure = values(instance, [1.0, NAN, 3.0, 0.0, 1.0], [0, 0, 0, 1, 1])
        without = values(instance, [1.0, 3.0, 0.0, 1.0], [0, 0, 1, 1])
        assert float(with_failure[1]) == 0.0
        assert torch.allclose(with_failure[[0, 2, 3, 4]], without)

    def test_one_valid_sample_and_none_give_zeros(self, instance: AdvantageEstimator) -> None:
        assert values(instance, [NAN, 2.0, NAN], [0, 0, 0]).tolist() == [0.0] * 3
        assert values(instance, [NAN, NAN], [0, 0]).tolist() == [0.0] * 2

    def test_a_constant_shift_changes_nothing(self, instance: AdvantageEstimator) -> None:
        self.require("shift")
        rewards, ids = [0.0, 0.25, 1.0, 0.5, 2.0], [0, 0, 0, 1, 1]
        shifted = values(instance, [reward + 8.0 for reward in rewards], ids)
        assert torch.allclose(values(instance, rewards, ids), shifted, atol=1e-5)

    def test_the_order_of_samples_and_the_numbers_of_groups_do_not_matter(
        self, instance: AdvantageEstimator
    ) -> None:
        rewards, ids = [0.0, 0.25, 1.0, 0.5, 2.0, 3.0], [0, 0, 0, 1, 1, 1]
        order = [4, 0, 5, 2, 1, 3]
        shuffled = values(
            instance, [rewards[place] for place in order], [40 - ids[place] for place in order]
        )
        assert torch.allclose(shuffled, values(instance, rewards, ids)[order])

    def test_better_samples_get_more(self, instance: AdvantageEstimator) -> None:
        low, middle, high = values(instance, [0.1, 0.2, 0.9], [0, 0, 0]).tolist()
        assert low < middle < high

    def test_a_reward_of_one_term_is_that_term(self, instance: AdvantageEstimator) -> None:
        rewards = grouped([0.0, 0.25, NAN, 0.5, 2.0, 3.0], [0, 0, 0, 1, 1, 1])
        term = replace(rewards, terms=rewards.rewards[:, None], weights=(1.0,), names=("only",))
        found, plain = instance.advantages(term), instance.advantages(rewards)
        assert torch.allclose(found.values, plain.values, atol=1e-6)
        assert all(math.isfinite(figure) for figure in found.statistics.values())

    def test_results_are_float32_and_figures_finite(self, instance: AdvantageEstimator) -> None:
        result = instance.advantages(grouped([1.0, NAN, 3.0, 2.0], [0, 0, 0, 1]))
        assert result.values.dtype == torch.float32
        assert result.values.shape == (4,)
        assert all(math.isfinite(figure) for figure in result.statistics.values())
        assert all("/" in name for name in result.statistics)


def grouped(rewards: Sequence[float], ids: Sequence[int]) -> GroupedRewards:
    """Return rewards by group; NaN is a failed sample."""
    rewards_N = torch.tensor(rewards, dtype=torch.float32)
    return GroupedRewards(
        rewards=rewards_N, group_ids=torch.tensor(ids), valid=~torch.isnan(rewards_N)
    )


def values(estimator: AdvantageEstimator, rewards: Sequence[float], ids: Sequence[int]) -> Tensor:
    """Return the advantages ``(N,)``."""
    return estimator.advantages(grouped(rewards, ids)).values
