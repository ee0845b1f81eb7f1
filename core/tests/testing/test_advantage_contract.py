"""The advantage contract fails on estimators that mix groups, follow failures or divide by noise."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from contract_runs import Verdict, judged, offered, plugin_in
from torch import Tensor

from drl.api import (
    API_VERSION,
    AdvantageEstimator,
    Advantages,
    Component,
    GroupedRewards,
    hookimpl,
)
from drl.catalog import Catalog
from drl.testing.contracts.advantage import AdvantageContract

DRL_API = API_VERSION


class Centred(AdvantageEstimator):
    """An honest estimator: rewards minus the mean of their group. The wrong ones change one thing."""

    def advantages(self, rewards: GroupedRewards) -> Advantages:
        values_N = torch.zeros_like(rewards.rewards)
        for group in rewards.group_ids.unique().tolist():
            members = (rewards.group_ids == group) & rewards.valid
            if int(members.sum()) > 1:
                values_N[members] = self.values_of(rewards.rewards[members])
        return Advantages(values=values_N, statistics={"rollout/groups": 1.0})

    def values_of(self, rewards: Tensor) -> Tensor:
        return (rewards.double() - rewards.double().mean()).float()


class Reshaping(Centred):
    """Takes groups to be equal runs of the list, whatever the ids say."""

    def advantages(self, rewards: GroupedRewards) -> Advantages:
        count = len(rewards.group_ids.unique())
        order = torch.arange(len(rewards.rewards)) * count // len(rewards.rewards)
        return super().advantages(
            GroupedRewards(rewards=rewards.rewards, group_ids=order, valid=rewards.valid)
        )


class Trusting(Centred):
    """Believes that every sample was scored."""

    def advantages(self, rewards: GroupedRewards) -> Advantages:
        everything = torch.ones_like(rewards.valid)
        return super().advantages(
            GroupedRewards(rewards=rewards.rewards, group_ids=rewards.group_ids, valid=everything)
        )


class DividingByNoise(Centred):
    """Divides by the deviation even where there is none; adds its own rounding first."""

    def values_of(self, rewards: Tensor) -> Tensor:
        noisy = rewards + torch.arange(len(rewards)) * 1e-6
        return (noisy - noisy.mean()) / noisy.std()


class Alone(Centred):
    """Gives a sample without company its reward."""

    def advantages(self, rewards: GroupedRewards) -> Advantages:
        found = super().advantages(rewards)
        lonely = rewards.valid & (found.values == 0) & (rewards.rewards > 1.5)
        return Advantages(values=torch.where(lonely, rewards.rewards, found.values))


class Relative(Centred):
    """Divides by the mean, so that a shift of all rewards changes the result."""

    def values_of(self, rewards: Tensor) -> Tensor:
        return super().values_of(rewards) / rewards.mean().clamp(min=1e-3)


class Upside(Centred):
    def values_of(self, rewards: Tensor) -> Tensor:
        return -super().values_of(rewards)


class Wide(Centred):
    def advantages(self, rewards: GroupedRewards) -> Advantages:
        found = super().advantages(rewards)
        return Advantages(values=found.values.double(), statistics=found.statistics)


class Unnamed(Centred):
    """Reports figures without a place in the log."""

    def advantages(self, rewards: GroupedRewards) -> Advantages:
        return Advantages(values=super().advantages(rewards).values, statistics={"groups": 1.0})


class Undefined(Centred):
    """Reports a mean that a failed sample spoils."""

    def advantages(self, rewards: GroupedRewards) -> Advantages:
        mean = float(rewards.rewards.mean())
        return Advantages(
            values=super().advantages(rewards).values, statistics={"rollout/mean": mean}
        )


class Counting(Centred):
    """Grows with the number of terms, also when there is one."""

    def advantages(self, rewards: GroupedRewards) -> Advantages:
        found = super().advantages(rewards)
        return Advantages(values=found.values * (1 + len(rewards.names)))


CASES: list[tuple[type[Centred], str, str]] = [
    (Reshaping, "test_matches_the_table_worked_by_hand", "assert [-"),
    (Reshaping, "test_the_order_of_samples_and_the_numbers_of_groups_do_not_matter", "allclose"),
    (Trusting, "test_failed_samples_get_zero_and_change_nobody", "nan"),
    (Trusting, "test_one_valid_sample_and_none_give_zeros", "nan"),
    (DividingByNoise, "test_equal_rewards_give_zeros", "[0.0] * 7"),
    (Alone, "test_one_valid_sample_and_none_give_zeros", "2.0"),
    (Relative, "test_a_constant_shift_changes_nothing", "shifted"),
    (Counting, "test_a_reward_of_one_term_is_that_term", "allclose"),
    (Upside, "test_better_samples_get_more", "low < middle < high"),
    (Wide, "test_results_are_float32_and_figures_finite", "torch.float64 == torch.float32"),
    (Unnamed, "test_results_are_float32_and_figures_finite", '"/" in name'),
    (Undefined, "test_results_are_float32_and_figures_finite", "math.isfinite(figure)"),
]


@hookimpl
def drl_register_advantages() -> list[Component]:
    return offered([Centred, *[case[0] for case in CASES]])


class Checks(AdvantageContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("advantage", "centred")

    @pytest.fixture
    def catalog(self) -> Catalog:
        return plugin_in(__name__)

    @pytest.fixture
    def table(self) -> list[tuple[list[float], list[int], list[float]]]:
        return [
            ([1.0, 3.0], [0, 0], [-1.0, 1.0]),
            ([1.0, 5.0, 3.0, 7.0, 0.0], [0, 1, 0, 1, 1], [-1.0, 1.0, 1.0, 3.0, -4.0]),
        ]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    cases = [(wrong, check) for wrong, check, _ in CASES]
    return judged(Checks, tmp_path_factory.mktemp("checks"), cases, honest=Centred)


def test_an_honest_estimator_passes_every_check(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["Centred"]
    assert (found.failed, found.skipped) == ({}, {})
    assert {case[1] for case in CASES} <= found.passed


@pytest.mark.parametrize(("wrong", "check", "said"), CASES)
def test_a_wrong_estimator_is_caught(
    verdicts: dict[str, Verdict], wrong: type[Centred], check: str, said: str
) -> None:
    assert said in verdicts[wrong.__name__].failed[check]


def test_an_estimator_may_state_that_shifts_count(tmp_path: Path) -> None:
    check = "test_a_constant_shift_changes_nothing"
    stated = {"capabilities": {"shift": False}}
    found = judged(Checks, tmp_path, [(Relative, check)], honest=Relative, members=stated)
    assert "advantage 'relative' states shift = False" in found["Relative"].skipped[check]


def test_a_contract_without_its_table_says_what_is_missing(tmp_path: Path) -> None:
    check = "test_matches_the_table_worked_by_hand"
    bare = {"table": vars(AdvantageContract)["table"]}
    found = judged(Checks, tmp_path, [(Centred, check)], honest=Centred, members=bare)
    assert "Checks must give the fixture table" in found["Centred"].failed[check]
