"""Flow-GRPO's clipped policy loss (arXiv 2505.05470; PPO's clip, arXiv 1707.06347).

Axes: ``B`` rows (pairs), ``*L`` latent axes. Log-probabilities and means of several streams are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drl.api import (
    BadInput,
    Context,
    ContractError,
    ForwardInputs,
    Loss,
    LossOutput,
    Metric,
    Need,
    Pair,
    PairBatch,
    Predictions,
    Sample,
    ScoredTransition,
    StepContext,
    successor,
)
from drl.mathematics.gaussian import row_mean
from drl.mathematics.recorded import recorded_pairs


class PolicyLoss(Loss):
    """``max(-A ratio, -A clip(ratio))`` per recorded step, with a KL term when ``kl_beta`` is above 0."""

    needs = frozenset({Need.ROLLOUT, Need.OLD_LOG_PROB, Need.TRANSITION, Need.GUIDANCE})

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.kl_beta: float = context.section.kl_beta
        self.adv_clip_max: float = context.section.adv_clip_max
        if self.kl_beta > 0:
            self.needs = PolicyLoss.needs | {Need.REFERENCE}

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        """Return one pair per stochastic step of the one sample of the unit."""
        if advantages is None:
            raise ContractError("policy_loss needs one advantage per sample, got none")
        return [
            pair
            for sample, advantage in zip(unit, advantages, strict=True)
            for pair in recorded_pairs(sample, advantage, context.sigmas)
        ]

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Feed the recorded latents of the step."""
        streams = {name: x for name, x in pairs.tensors.items() if successor(name) in pairs.tensors}
        return ForwardInputs(streams=streams)

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the weighted sum of the pairs' losses, and the metrics of the step."""
        if transition is None:
            raise ContractError("policy_loss needs the scored transition, got none")
        clip_range: float = self.options.clip_range
        log_prob_B = torch.stack(list(transition.log_prob_B.values())).sum(0)
        # rows of weight 0 may hold anything: their old log-prob must not reach the sum as NaN or inf
        old_B = torch.where(pairs.weight_B > 0, pairs.values["log_prob_old"], log_prob_B.detach())
        advantage_B = pairs.values["advantage"].clamp(-self.adv_clip_max, self.adv_clip_max)
        ratio_B = torch.exp(log_prob_B - old_B)
        policy_B = clipped_policy_loss(advantage_B, ratio_B, clip_range)
        figures_B = _figures(advantage_B, log_prob_B, old_B, ratio_B, clip_range)
        figures_B["policy_loss"] = policy_B
        loss_B = policy_B
        if self.kl_beta > 0:
            kl_B = self._kl(transition, pairs)
            figures_B["kl_loss"] = kl_B
            loss_B = policy_B + self.kl_beta * kl_B
        figures_B |= {"loss": loss_B, "loss_abs_mean": loss_B.abs()}
        metrics = {name: _mean(values, pairs.weight_B) for name, values in figures_B.items()}
        first_weight_B = pairs.weight_B[:1].gt(0).float()
        metrics["log_prob_new_idx_0"] = _mean(log_prob_B[:1], first_weight_B)
        metrics["log_prob_old_idx_0"] = _mean(old_B[:1], first_weight_B)
        return LossOutput(loss=(pairs.weight_B * loss_B).sum(), metrics=metrics)

    def _kl(self, transition: ScoredTransition, pairs: PairBatch) -> Tensor:
        if transition.reference_mean is None:
            raise BadInput(
                f"algorithm.kl_beta is {self.kl_beta}, but there is no reference prediction; set "
                'algorithm.ref_mode = "lora_base" or "ema", or algorithm.kl_beta = 0'
            )
        total_B = torch.zeros_like(pairs.weight_B)
        for stream, mean in transition.mean.items():
            std_dev_t_B = transition.std_dev_t_B[stream]
            if bool((std_dev_t_B == 0).any()):
                places = [pair.id for pair in pairs.pairs]
                raise BadInput(
                    f"algorithm.kl_beta is {self.kl_beta}, but a step of the pairs {places} (sample, "
                    "step) has no noise to divide the KL by; keep the last step out of the stochastic "
                    "steps, or set algorithm.kl_beta = 0"
                )
            total_B = total_B + gaussian_kl(mean, transition.reference_mean[stream], std_dev_t_B)
        return total_B


def clipped_policy_loss(advantage_B: Tensor, ratio_B: Tensor, clip_range: float) -> Tensor:
    """Return ``max(-A ratio, -A clamp(ratio, 1 - c, 1 + c))``, ``(B,)`` float32."""
    clipped_B = ratio_B.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantage_B * ratio_B, -advantage_B * clipped_B)


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std_dev_t_B: Tensor) -> Tensor:
    """Return ``mean((mu - mu_ref)^2) / (2 std_dev_t^2)``, ``(B,)`` float32.

    ``std_dev_t`` without the ``sqrt(-dt)`` of the noise, as Flow-GRPO's SD3, Flux and Qwen trainers.
    """
    return row_mean((mean - reference_mean.detach()) ** 2) / (2 * std_dev_t_B**2)


def _figures(
    advantage_B: Tensor, log_prob_B: Tensor, old_B: Tensor, ratio_B: Tensor, clip_range: float
) -> dict[str, Tensor]:
    difference_B = log_prob_B - old_B
    return {
        "adv_abs_mean": advantage_B.abs(),
        "ratio_mean": ratio_B,
        "ratio_abs_minus_1": (ratio_B - 1).abs(),
        "approx_kl": 0.5 * difference_B**2,
        "clipfrac": ((ratio_B - 1).abs() > clip_range).float(),
        "log_prob_mean_abs_diff": difference_B.abs(),
    }


def _mean(values_B: Tensor, weight_B: Tensor) -> Metric:
    return Metric(total=(weight_B * values_B.detach()).sum(), count=weight_B.sum())
