"""Rewards of a rollout to advantages: groups by id, failed and removed samples masked or counted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from drl.components import EMPTY
from drl.errors import ContractError
from drl.stages.functions import CONVERT, processed_rewards
from drl.types import Advantages, GroupedRewards, Rollout, Sample, Score

if TYPE_CHECKING:
    from torch import Tensor

    from drl.run import Run


def estimate(run: Run, rollout: Rollout) -> Advantages | None:
    """Return one advantage per sample of the rollout, or None for losses without rewards."""
    if run.advantage is None or run.functions.get(CONVERT) is not None:
        return None
    processed = processed_rewards(run, rollout.samples)
    if processed is not None:
        return processed
    rewards = grouped_rewards(rollout, run.rewards.weights)
    advantages = run.advantage.advantages(rewards)
    if advantages.values.shape != rewards.rewards.shape or not advantages.values.isfinite().all():
        raise ContractError(
            f"advantage estimator {type(run.advantage).__name__} must return one finite value per "
            f"sample ({tuple(rewards.rewards.shape)}), got {tuple(advantages.values.shape)}"
        )
    return advantages


def grouped_rewards(rollout: Rollout, weights: Mapping[str, float] = EMPTY) -> GroupedRewards:
    """Gather rewards by group id; a removed sample still counts for its group's statistics.

    ``weights``: the reward terms; those that count become the columns of ``terms``.
    """
    samples = rollout.samples
    counted = {name: weight for name, weight in weights.items() if weight != 0.0}
    values = [math.nan if sample.reward is None else sample.reward for sample in samples]
    rewards = torch.tensor(values, dtype=torch.float32)
    return GroupedRewards(
        rewards=rewards,
        group_ids=torch.tensor([sample.group_index for sample in samples], dtype=torch.int64),
        valid=~rewards.isnan(),
        terms=_terms(samples, tuple(counted)) if counted else None,
        weights=tuple(counted.values()),
        names=tuple(counted),
    )


def _terms(samples: Sequence[Sample], names: Sequence[str]) -> Tensor:
    """Return the scores ``(N, K)`` float32; NaN where a term gave none."""
    rows = [
        [math.nan if name not in sample.scores else _value(sample.scores[name]) for name in names]
        for sample in samples
    ]
    return torch.tensor(rows, dtype=torch.float32)


def _value(score: Score) -> float:
    return math.nan if score.value is None else score.value


def reward_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the figures of the raw rewards, and of each term, for the log."""
    values = [sample.reward for sample in rollout.samples if sample.reward is not None]
    if not values:
        return {}
    rewards = torch.tensor(values, dtype=torch.float64)
    metrics = {
        "rollout/reward/raw_mean": rewards.mean().item(),
        "rollout/reward/raw_std": rewards.std(correction=0).item(),
        "rollout/reward/raw_min": rewards.min().item(),
        "rollout/reward/raw_max": rewards.max().item(),
        "rollout/reward/raw_median": rewards.median().item(),
        "rollout/reward/raw_num_samples": float(len(values)),
        "rollout/reward/failed": float(len(rollout.samples) - len(values)),
    }
    for reason, count in rollout.dropped.items():
        metrics[f"rollout/dynamic_filter/drop_{reason}"] = float(count)
    metrics["rollout/identical_samples"] = float(identical_samples(rollout))
    return metrics | _term_means(rollout)


def identical_samples(rollout: Rollout) -> int:
    """Count samples that show the same picture as another of their group: noise that did not differ."""
    repeated = 0
    for group in rollout.groups:
        shown = [sample.media.pixels for sample in group.samples if sample.media is not None]
        # every 97th value tells pictures apart at a fraction of the cost
        prints = [pixels.flatten()[::97].numpy().tobytes() for pixels in shown]
        repeated += len(prints) - len(set(prints))
    return repeated


def _term_means(rollout: Rollout) -> dict[str, float]:
    names = {name for sample in rollout.samples for name in sample.scores}
    means = {}
    for name in sorted(names):
        scores = [sample.scores[name].value for sample in rollout.samples if name in sample.scores]
        known = [value for value in scores if value is not None and math.isfinite(value)]
        if known:
            means[f"rollout/reward/{name}_mean"] = sum(known) / len(known)
    return means
