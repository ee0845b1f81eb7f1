"""``gdpo``: every reward term normalised within its group, then summed (GDPO, arXiv 2601.05242).

A sum of rewards is ruled by the term that varies most in absolute numbers; here a term counts by its
weight alone, whatever its scale. Axes: ``N`` samples, ``K`` reward terms, ``Q`` groups. Groups are
found by id; failed samples are masked. Sums run in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drl.builtin.advantage_groups import STD_EPSILON, group_figures, has_spread, is_informative
from drl.errors import BadInput, ContractError
from drl.interfaces.advantage import AdvantageEstimator
from drl.mathematics.statistics import group_statistics
from drl.types import Advantages, GroupedRewards


class Gdpo(AdvantageEstimator):
    """``sum_k w_k (r_k - mean_k) / (std_k + 1e-4)``, divided by its std over the rollout."""

    def advantages(self, rewards: GroupedRewards) -> Advantages:
        """Return ``(N,)`` float32; 0 for failed samples and where no term has spread in the group.

        A term that a sample lacks adds nothing to it. Raises ContractError when terms and weights
        differ in number, BadInput for a sample that has a reward and none of the terms.
        """
        terms_NK, weights = terms_of(rewards)
        valid_N = rewards.valid & rewards.rewards.isfinite()
        if bool((valid_N & ~terms_NK.isfinite().any(1)).any()):
            raise BadInput(
                f"gdpo: a sample has a reward, but no score of the terms that count {rewards.names}; give "
                "the reward that its row asks for (metadata.rm_type) a weight in reward.terms, or set "
                'algorithm.advantage_estimator = "grpo"'
            )
        groups = group_statistics(rewards.rewards, rewards.group_ids, valid_N)
        values_N = torch.zeros(len(valid_N), dtype=torch.float64)
        informative_Q = torch.zeros(len(groups.ids), dtype=torch.bool)
        figures: dict[str, float] = {}
        for place, weight in enumerate(weights):
            term_N, spread_Q = self._normalised(terms_NK[:, place], rewards.group_ids, valid_N)
            values_N += weight * term_N
            informative_Q |= spread_Q
            if rewards.names:
                name = f"rollout/informative_groups/{rewards.names[place]}"
                figures[name] = float(spread_Q.sum()) / len(groups.ids)
        if self.options.batch_normalization:
            # its mean is 0 already, because every term is centred within its group
            whole = group_statistics(values_N, torch.zeros_like(rewards.group_ids), valid_N)
            values_N = values_N / (whole.stds_Q[0] + STD_EPSILON)
        return Advantages(
            values=values_N.float(), statistics=group_figures(groups, informative_Q) | figures
        )

    def _normalised(
        self, term_N: Tensor, group_ids_N: Tensor, valid_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return one term normalised within its groups, ``(N,)`` float64, and where it has spread, ``(Q,)``."""
        known_N = valid_N & term_N.isfinite()
        groups = group_statistics(term_N, group_ids_N, known_N)
        floor: float = self.options.std_floor
        share_Q = has_spread(groups, floor) / (groups.stds_Q + STD_EPSILON)
        scaled_N = (term_N.double() - groups.means_Q[groups.place_N]) * share_Q[groups.place_N]
        return torch.where(known_N, scaled_N, 0.0), is_informative(groups, floor)


def terms_of(rewards: GroupedRewards) -> tuple[Tensor, tuple[float, ...]]:
    """Return the terms ``(N, K)`` and their weights; the reward itself where no terms are known."""
    if rewards.terms is None:
        return rewards.rewards[:, None], (1.0,)
    if rewards.terms.shape != (len(rewards.rewards), len(rewards.weights)):
        raise ContractError(
            f"GroupedRewards.terms must be (samples, terms) = ({len(rewards.rewards)}, "
            f"{len(rewards.weights)}), got {tuple(rewards.terms.shape)}"
        )
    return rewards.terms, rewards.weights
