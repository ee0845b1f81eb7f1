"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO's clipped loss with a normalised, reweighted ratio.

Between two Gaussians of one std ``s``, ``log r = e d / s - d^2 / (2 s^2)`` with ``d = mu - mu_old`` and
the step's noise ``e``: centred below 0, and wider the smaller ``s``. RatioNorm takes both
out, ``log r' = s (log r + d^2 / (2 s^2)) = e d``, and the gradient is reweighted by ``1 / -dt``, as in
flow_grpo's ``train_sd3_GRPO_Guard.py``. Products and squares are means over elements.

Axes: ``B`` rows (pairs), ``*L`` latent axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drl.api import (
    ContractError,
    ForwardInputs,
    LossOutput,
    Need,
    PairBatch,
    Predictions,
    ScoredTransition,
)
from drl.mathematics.gaussian import row_mean
from drl.mathematics.objectives import RecordedLoss, clipped_policy_loss, new_and_old_log_prob


class GrpoGuard(RecordedLoss):
    """``max(-A r', -A clip(r')) / -dt`` per recorded step, with a KL term when ``kl_beta`` is above 0."""

    needs = frozenset(
        {
            Need.ROLLOUT,
            Need.OLD_LOG_PROB,
            Need.TRANSITION,
            Need.OLD_PREDICTION,
            Need.GUIDANCE,
        }
    )

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the weighted sum of the pairs' losses, and the metrics of the step."""
        transition = self.scored(transition)
        if predictions.old is None:
            raise ContractError("grpo_guard needs the prediction of the old policy, got none")
        log_prob_B, old_B = new_and_old_log_prob(pairs, transition)
        advantage_B = self.clamped_advantage(pairs)
        interval_B = pairs.sigma_B - pairs.values["sigma_next"]
        moved_B, noise_std_B = [], []
        for stream, trained in predictions.trained.items():
            std_dev_t_B = transition.std_dev_t_B[stream]
            slope_B = -interval_B * velocity_slope(pairs.sigma_B, std_dev_t_B)
            change = trained.float() - predictions.old[stream].detach().float()
            moved_B.append(slope_B**2 * row_mean(change**2))
            noise_std_B.append(std_dev_t_B * interval_B.sqrt())
        ratio_B = normalised_ratio(log_prob_B - old_B, moved_B, noise_std_B)
        clip: float = self.options.clip_range
        policy_B = guarded_loss(advantage_B, ratio_B, interval_B, clip)
        loss_B, figures_B = policy_B, {"policy_loss": policy_B}
        if self.kl_beta > 0:
            figures_B["kl_loss"] = kl_B = self.gaussian_kl(transition)
            loss_B = policy_B + self.kl_beta * kl_B
        figures_B |= {
            "loss_abs_mean": loss_B.abs(),
            "adv_abs_mean": advantage_B.abs(),
            "ratio_mean": ratio_B,
            "ratio_abs_minus_1": (ratio_B - 1).abs(),
            "clipfrac": ((ratio_B - 1).abs() > clip).float(),
            "log_prob_mean_abs_diff": (log_prob_B - old_B).abs(),
        }
        return LossOutput.weighted(loss_B, pairs.weight_B, figures_B)


def velocity_slope(sigma_B: Tensor, std_dev_t_B: Tensor) -> Tensor:
    """Return ``d mean / d velocity`` of a Flow-SDE step over ``dt``, ``(B,)``.

    ``1 + std_dev_t^2 (1 - sigma) / (2 sigma)`` (the step of Flow-GRPO, arXiv 2505.05470); also
    DanceGRPO's, whose ``std_dev_t`` is constant.
    """
    return 1 + std_dev_t_B**2 * (1 - sigma_B) / (2 * sigma_B)


def normalised_ratio(
    log_ratio_B: Tensor, moved_B: Sequence[Tensor], noise_std_B: Sequence[Tensor]
) -> Tensor:
    """Return ``exp(s (log r + mean_nb((mu - mu_old)^2) / (2 s^2)))``, ``(B,)`` float32.

    ``moved_B``: ``mean_nb((mu - mu_old)^2)`` of each stream; ``noise_std_B``: its ``s``, above 0; each
    ``(B,)``. What several streams moved adds up; the outer ``s`` is then their average.
    """
    bias_B = torch.stack(
        [moved / (2 * std**2) for moved, std in zip(moved_B, noise_std_B, strict=True)]
    ).sum(0)
    return torch.exp(torch.stack(list(noise_std_B)).mean(0) * (log_ratio_B + bias_B))


def guarded_loss(
    advantage_B: Tensor, ratio_B: Tensor, interval_B: Tensor, clip_range: float
) -> Tensor:
    """Return ``max(-A r', -A clamp(r', 1 - c, 1 + c)) / -dt``, ``(B,)``; ``interval_B`` is ``-dt``.

    With the ``s`` of RatioNorm every step moves the velocity alike, whatever its length.
    """
    return clipped_policy_loss(advantage_B, ratio_B, clip_range) / interval_B
