"""The stock functions of a rollout, and the source without text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drl.builtin.data_blank import BlankSource
from drl.builtin.functions_rollout import pop_first, zero_std
from drl.catalog import Catalog
from drl.errors import DataError
from drl.testing import make_sample
from drl.testing.contracts.data_source import DataSourceContract
from drl.testing.contracts.function import FunctionContract
from drl.types import Context, Dropped, Group, Prompt


def group(*rewards: float | None) -> Group:
    samples = [make_sample(index=n, member=n, reward=r) for n, r in enumerate(rewards)]
    return Group(group_index=0, prompt=Prompt(row=1, text="a sign"), samples=samples)


RUN: Any = SimpleNamespace()


@pytest.mark.parametrize("rewards", [(0.0, 1.0), (0.5, 0.5, 0.51), (None, 0.2, 0.4), (-1.0, 1.0)])
def test_a_group_whose_rewards_differ_is_kept(rewards: tuple[float | None, ...]) -> None:
    assert zero_std(RUN, group(*rewards)) is True


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((0.5, 0.5), "zero_std_0.5"),
        ((0.0, 0.0, 0.0), "zero_std_0.0"),
        ((0.1, 0.1, 0.1), "zero_std_0.1"),  # their sum is not 0.3
        ((0.1, 0.1 + 1e-9), "zero_std_0.1"),
        ((0.26, 0.26, None), "zero_std_0.3"),
        ((-0.04, -0.04), "zero_std_0.0"),
        ((3.0,), "too_few_rewards"),
        ((None, 3.0), "too_few_rewards"),
        ((None, float("nan")), "too_few_rewards"),
    ],
)
def test_a_group_without_spread_is_dropped_and_named_by_its_reward(
    rewards: tuple[float | None, ...], reason: str
) -> None:
    assert zero_std(RUN, group(*rewards)) == Dropped(reason)


def test_the_stock_order_of_the_buffer_is_first_in_first_out() -> None:
    waiting = [group(0.1), group(0.2), group(0.3)]
    first = waiting[0]
    assert pop_first(RUN, None, waiting, 1) == [first]
    assert len(waiting) == 2
    assert len(pop_first(RUN, 3, waiting, 9)) == 2


@pytest.mark.parametrize(
    ("slot", "name"),
    [
        ("rollout.dynamic_sampling_filter", "zero_std"),
        ("rollout.buffer_filter", "pop_first"),
        ("rollout.function", "own"),
        ("eval.function", "own"),
    ],
)
def test_each_is_found_under_its_name(slot: str, name: str) -> None:
    assert callable(Catalog.load().function(slot, name))


class TestBlank(DataSourceContract):
    component = ("data_source", "blank")
    capabilities = {"epochs": False, "buffer": False, "file": False}  # noqa: RUF012


def test_blank_prompts_are_numbered_and_have_no_text() -> None:
    source = BlankSource(None, Context())
    assert source.take(2) == [Prompt(row=1, text=""), Prompt(row=2, text="")]
    assert source.rows() is None
    with pytest.raises(DataError, match="not negative, got -1"):
        source.take(-1)


class TestZeroStd(FunctionContract):
    component = ("function", "zero_std")
    slot = "rollout.dynamic_sampling_filter"

    @pytest.fixture
    def arguments(self) -> tuple[Any, ...]:
        return RUN, group(0.5, 0.5)


class TestPopFirst(FunctionContract):
    component = ("function", "pop_first")
    slot = "rollout.buffer_filter"

    @pytest.fixture
    def arguments(self) -> tuple[Any, ...]:
        return RUN, 3, [group(0.1), group(0.2), group(0.3)], 2
