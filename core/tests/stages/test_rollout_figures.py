"""Figures of a rollout, and the function that sees them before the log does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drl.errors import ContractError
from drl.stages.rollout_figures import log_rollout, normalised_figures, rollout_figures
from drl.testing import make_prompt, make_sample
from drl.types import Advantages, Group, Rollout


def rollout(*rewards: float | None, **fields: Any) -> Rollout:
    samples = [make_sample(index=n, seed=n, reward=r) for n, r in enumerate(rewards)]
    group = Group(group_index=0, prompt=make_prompt(), samples=samples)
    return Rollout(rollout_id=4, version=0, groups=[group], **fields)


def advantages(*values: float) -> Advantages:
    return Advantages(values=torch.tensor(values), statistics={"rollout/informative_groups": 1.0})


def run_with(function: Any) -> Any:
    return SimpleNamespace(functions=SimpleNamespace(get={"rollout.custom_log": function}.get))


def test_normalised_rewards_have_the_figures_of_the_raw_ones_and_failed_samples_none() -> None:
    figures = normalised_figures(rollout(1.0, None, 3.0, 2.0), advantages(-1.0, 0.0, 2.0, 0.5))
    assert figures == {
        "rollout/reward/norm_mean": pytest.approx(0.5),
        "rollout/reward/norm_std": pytest.approx(1.5**0.5),  # (2.25 + 2.25 + 0) / 3
        "rollout/reward/norm_min": -1.0,
        "rollout/reward/norm_max": 2.0,
        "rollout/reward/norm_median": 0.5,
        "rollout/reward/norm_num_samples": 3.0,
    }
    assert normalised_figures(rollout(None), advantages(0.0)) == {}


def test_figures_of_rewards_groups_and_draws_stand_in_one_row() -> None:
    made = rollout(1.0, 3.0, dropped={"dull": 2}, metrics={"rollout/surplus_groups": 1.0})
    figures = rollout_figures(made, advantages(-1.0, 1.0))
    assert figures["rollout/reward/raw_mean"] == 2.0
    assert figures["rollout/informative_groups"] == 1.0
    assert figures["rollout/reward/norm_max"] == 1.0
    assert figures["rollout/dynamic_filter/drop_dull"] == 2.0
    assert figures["rollout/surplus_groups"] == 1.0


def test_a_function_may_add_figures() -> None:
    def log(rollout_id: int, run: Any, samples: Any, extra: Any, seconds: float) -> bool:
        extra["mine/samples"] = len(samples)
        extra["mine/seconds"] = torch.tensor(seconds)
        extra["mine/id"] = rollout_id
        return False

    made = rollout(1.0, 3.0, metrics={"rollout/surplus_groups": 1.0})
    log_rollout(run_with(log), made, 2.5)
    figures = rollout_figures(made, None)
    assert (figures["mine/samples"], figures["mine/seconds"], figures["mine/id"]) == (2.0, 2.5, 4.0)
    assert "rollout/reward/raw_mean" in figures


def test_a_function_may_leave_drls_own_figures_out() -> None:
    def log(rollout_id: int, run: Any, samples: Any, extra: Any, seconds: float) -> bool:
        extra["mine/only"] = 1.0
        return True

    made = rollout(1.0, 3.0)
    log_rollout(run_with(log), made, 2.5)
    assert rollout_figures(made, advantages(-1.0, 1.0)) == {"mine/only": 1.0}


@pytest.mark.parametrize(
    ("answer", "figure", "said"),
    [
        ("yes", 1.0, "must return True .* got 'yes'"),
        (False, "high", "the figure 'mine/x' must be a number, got 'high'"),
    ],
)
def test_what_a_log_function_gives_is_checked(answer: Any, figure: Any, said: str) -> None:
    def log(rollout_id: int, run: Any, samples: Any, extra: Any, seconds: float) -> Any:
        extra["mine/x"] = figure
        return answer

    with pytest.raises(ContractError, match=f"rollout.custom_log.*{said}"):
        log_rollout(run_with(log), rollout(1.0), 0.0)
