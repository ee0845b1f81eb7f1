"""What the advantage estimators in core share: when a group says anything, and the figures of the log.

Axis ``Q`` runs over groups.
"""

from __future__ import annotations

from torch import Tensor

from drl.mathematics.statistics import GroupStatistics

STD_EPSILON = 1e-4
"""Added to a standard deviation before it divides (rl-post-training reference 2.1)."""


def has_spread(groups: GroupStatistics, floor: float) -> Tensor:
    """Return ``(Q,)`` bool; floor 0 counts every group of two or more, equal rewards included."""
    above_Q = groups.stds_Q > floor * groups.largest_Q if floor > 0 else groups.counts_Q > 1
    return above_Q & (groups.counts_Q > 1)


def is_informative(groups: GroupStatistics, floor: float) -> Tensor:
    """Return ``(Q,)`` bool: two or more valid samples, and a std above the floor and above 0."""
    return (groups.stds_Q > floor * groups.largest_Q) & (groups.counts_Q > 1)


def group_figures(groups: GroupStatistics, informative_Q: Tensor) -> dict[str, float]:
    """Return the figures of the log; ``group_std_avg`` is of biased stds, as the metric always was."""
    scored_Q = groups.counts_Q > 0
    count = int(scored_Q.sum())
    if count == 0:
        return {"rollout/informative_groups": 0.0}
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
