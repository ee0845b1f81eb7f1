"""Flow-GRPO's clipped policy loss (arXiv 2505.05470; PPO's clip, arXiv 1707.06347).

Axes: ``B`` rows (pairs), ``*L`` latent axes. Log-probabilities and means of several streams are summed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from drl.api import (
    Context,
    ForwardInputs,
    LossOutput,
    Metric,
    Need,
    PairBatch,
    Predictions,
    ScoredTransition,
)
from drl.mathematics.objectives import RecordedLoss, clipped_policy_loss, new_and_old_log_prob


class PolicyLoss(RecordedLoss):
    """``max(-A ratio, -A clip(ratio))`` per recorded step, with a KL term when ``kl_beta`` is above 0."""

    needs = frozenset({Need.ROLLOUT, Need.OLD_LOG_PROB, Need.TRANSITION, Need.GUIDANCE})

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.recomputes_old_log_prob = options.recompute_old_log_prob
        self.ratio_width = options.clip_range

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the weighted sum of the pairs' losses, and the metrics of the step."""
        transition = self.scored(transition)
        new_B, old_B = new_and_old_log_prob(pairs, transition)
        advantage_B = self.clamped_advantage(pairs)
        clip_range: float = self.options.clip_range
        ratio_B = (new_B - old_B).exp()
        policy_B = clipped_policy_loss(advantage_B, ratio_B, clip_range)
        figures_B = {
            "policy_loss": policy_B,
            "adv_abs_mean": advantage_B.abs(),
            "ratio_mean": ratio_B,
            "ratio_abs_minus_1": (ratio_B - 1).abs(),
            "approx_kl": 0.5 * (new_B - old_B) ** 2,
            "clipfrac": ((ratio_B - 1).abs() > clip_range).float(),
        }
        loss_B = policy_B
        if self.kl_beta > 0:
            figures_B["kl_loss"] = kl_B = self.gaussian_kl(transition)
            loss_B = policy_B + self.kl_beta * kl_B
        figures_B["loss_abs_mean"] = loss_B.abs()
        output = LossOutput.weighted(loss_B, pairs.weight_B, figures_B)
        return LossOutput(
            loss=output.loss, metrics={**output.metrics, **log_prob_metrics(pairs, new_B, old_B)}
        )


def log_prob_metrics(pairs: PairBatch, new_B: Tensor, old_B: Tensor) -> dict[str, Metric]:
    """Return how far the log-probs are from the old ones, and both of the first pair.

    Where the trainer recomputed the old ones, also how far these are from the engine's.
    """
    weight_B, first_B = pairs.weight_B, pairs.weight_B[:1].gt(0).float()
    metrics = {
        "log_prob_mean_abs_diff": Metric.weighted(
            (new_B - old_B).abs(), weight_B, by_component=True
        ),
        "log_prob_new_idx_0": Metric.weighted(new_B[:1], first_B),
        "log_prob_old_idx_0": Metric.weighted(old_B[:1], first_B),
    }
    if "log_prob_rollout" in pairs.values:
        metrics["log_prob_recompute_abs_diff"] = Metric.weighted(
            (old_B - pairs.values["log_prob_rollout"]).abs(), weight_B, by_component=True
        )
    return metrics
