"""``grpo`` against other projects' numbers on uneven groups; they divide by another deviation."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from drl.builtin.advantage_grpo import Grpo
from drl.builtin.config_advantages import GrpoOptions
from drl.testing.contracts.advantage import grouped
from drl.testing.golden import load_golden
from drl.types import Context


def advantages(rewards: list[float], ids: list[int], **options: Any) -> list[float]:
    estimator = Grpo(GrpoOptions(**options), Context(section=SimpleNamespace()))
    values: list[float] = estimator.advantages(grouped(rewards, ids)).values.tolist()
    return values


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("update", ["advantages", "after_clear"])
def test_golden_uneven_groups_of_flow_grpo(place: int, update: str) -> None:
    """Groups of 3, 2, 1 and 2 by prompt; its std is biased, so each quotient is scaled by hand."""
    case = load_golden("advantages")["flow_grpo_tracker"][place]
    rewards = case["rewards" if update == "advantages" else "second_rewards"]
    ids = [ord(prompt) for prompt in case["prompts"]]
    groups = {
        number: [r for r, n in zip(rewards, ids, strict=True) if n == number] for number in ids
    }
    biased, unbiased = [], []
    for number in ids:
        members = rewards if case["global_std"] else groups[number]
        biased.append(statistics.pstdev(members))
        unbiased.append(statistics.stdev(members) if len(members) > 1 else 0.0)
    found = advantages(rewards, ids, globalize_std=case["global_std"])
    expected = [
        theirs * (low + 1e-4) / (high + 1e-4)
        for theirs, low, high in zip(case[update], biased, unbiased, strict=True)
    ]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    centred = advantages(rewards, ids, std_normalization=False)
    assert centred == pytest.approx(
        [theirs * (low + 1e-4) for theirs, low in zip(case[update], biased, strict=True)], abs=1e-6
    )


@pytest.mark.parametrize("place", [0, 1])
def test_golden_advantages_of_dance_grpo(place: int) -> None:
    """Unbiased as here, with 1e-8 in place of 1e-4; without groups it is one group."""
    case = load_golden("advantages")["dance_grpo"][place]
    rewards, size = case["rewards"], case["num_generations"] if case["use_group"] else 12
    ids = [number // size for number in range(len(rewards))]
    found = advantages(rewards, ids)
    for start in range(0, len(rewards), size):
        deviation = statistics.stdev(rewards[start : start + size])
        scale = (deviation + 1e-8) / (deviation + 1e-4)
        theirs = case["advantages"][start : start + size]
        assert found[start : start + size] == pytest.approx([a * scale for a in theirs], rel=1e-5)
