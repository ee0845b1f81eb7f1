"""``grpo``: rewards normalised within their group (DeepSeekMath, arXiv 2402.03300, section 4.1).

Unbiased standard deviations with 1e-4 added (rl-post-training reference 2.1). Axes: ``N`` samples, ``Q``
groups. Groups are found by id; failed samples are masked. Sums run in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drl.interfaces.advantage import AdvantageEstimator
from drl.mathematics.statistics import GroupStatistics, group_statistics
from drl.types import Advantages, GroupedRewards

STD_EPSILON = 1e-4


class Grpo(AdvantageEstimator):
    """``(r - mean) / (std + 1e-4)`` within a group, or over the whole rollout where switched."""

    def advantages(self, rewards: GroupedRewards) -> Advantages:
        """Return ``(N,)`` float32.

        0 for failed samples, for a group with fewer than two valid samples or without spread. When
        every group has one sample there is no spread to divide by, and none is.
        """
        rewards_N = rewards.rewards.double()
        valid_N = rewards.valid & torch.isfinite(rewards_N)
        groups = group_statistics(rewards_N, rewards.group_ids, valid_N)
        whole = group_statistics(rewards_N, torch.zeros_like(rewards.group_ids), valid_N)
        center = whole if self.options.globalize_mean else groups
        values_N = rewards_N - center.means_Q[center.place_N]
        if self.options.std_normalization and bool((groups.sizes_Q > 1).any()):
            scale = whole if self.options.globalize_std else groups
            has_spread_Q = _has_spread(scale, self.options.std_floor)
            share_Q = has_spread_Q / (scale.stds_Q + STD_EPSILON)
            values_N = values_N * share_Q[scale.place_N]
        values_N = torch.where(valid_N, values_N, 0.0)
        return Advantages(
            values=values_N.float(), statistics=_statistics(groups, self.options.std_floor)
        )


def _has_spread(groups: GroupStatistics, floor: float) -> Tensor:
    """Return ``(Q,)`` bool; floor 0 counts every group of two or more, equal rewards included."""
    above_Q = groups.stds_Q > floor * groups.largest_Q if floor > 0 else groups.counts_Q > 1
    return above_Q & (groups.counts_Q > 1)


def _statistics(groups: GroupStatistics, floor: float) -> dict[str, float]:
    """Return the figures of the log; ``group_std_avg`` is of biased stds, as the metric always was."""
    scored_Q = groups.counts_Q > 0
    count = int(scored_Q.sum())
    if count == 0:
        return {"rollout/informative_groups": 0.0}
    informative_Q = (groups.stds_Q > floor * groups.largest_Q) & (groups.counts_Q > 1)
    figures = {
        "rollout/reward/group_mean_avg": float(groups.means_Q[scored_Q].mean()),
        "rollout/reward/group_std_avg": float(groups.biased_stds_Q[scored_Q].mean()),
        "rollout/informative_groups": float(informative_Q.sum()) / len(groups.ids),
    }
    flat_Q = scored_Q & ~informative_Q & (groups.counts_Q > 1)
    for mean in groups.means_Q[flat_Q].tolist():
        # + 0.0: a mean of -0.04 must not make a second key "-0.0"
        key = f"rollout/zero_std/count_{round(mean, 1) + 0.0}"
        figures[key] = figures.get(key, 0.0) + 1.0
    return figures
