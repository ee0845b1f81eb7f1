"""``grpo``: rewards normalised within their group (DeepSeekMath, arXiv 2402.03300, section 4.1).

Unbiased standard deviations with 1e-4 added (rl-post-training reference 2.1). Axes: ``N`` samples, ``Q``
groups. Groups are found by id; failed samples are masked. Sums run in float64.
"""

from __future__ import annotations

import torch

from drl.builtin.advantage_groups import STD_EPSILON, group_figures, has_spread, is_informative
from drl.interfaces.advantage import AdvantageEstimator
from drl.mathematics.statistics import group_statistics
from drl.types import Advantages, GroupedRewards


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
            has_spread_Q = has_spread(scale, self.options.std_floor)
            share_Q = has_spread_Q / (scale.stds_Q + STD_EPSILON)
            values_N = values_N * share_Q[scale.place_N]
        values_N = torch.where(valid_N, values_N, 0.0)
        informative_Q = is_informative(groups, self.options.std_floor)
        return Advantages(values=values_N.float(), statistics=group_figures(groups, informative_Q))
