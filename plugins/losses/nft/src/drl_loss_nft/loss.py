"""DiffusionNFT (arXiv 2509.16117): forward process, positive and negative policy around the old one.

Axes: ``B`` rows (pairs), ``*L`` latent axes; errors of several streams are summed. A pair is one noise
level of a sample's final latents; how the rollout arrived at them does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drl.api import (
    ContractError,
    ForwardInputs,
    LossOutput,
    Need,
    Pair,
    PairBatch,
    Predictions,
    Sample,
    ScoredTransition,
    StepContext,
)
from drl.mathematics.gaussian import over_rows, row_mean
from drl.mathematics.noising import noised, pair_noise, squared_distance
from drl.mathematics.objectives import AdvantageLoss
from drl.mathematics.recorded import final_latents, weight_of
from drl_loss_nft.levels import trained_levels

SMALLEST_WEIGHT = 1e-5
"""Floor of the adaptive weight, for a prediction that is exact."""


class Nft(AdvantageLoss):
    """``m (r l+ + (1 - r) l-) / beta``; with ``kl_beta`` above 0 also the distance to a reference."""

    needs = frozenset({Need.ROLLOUT, Need.OLD_PREDICTION})

    def pairs_of(self, sample: Sample, advantage: float, context: StepContext) -> list[Pair]:
        """Return one pair per trained noise level, in the sample's own order."""
        trajectory, clean = final_latents(sample)
        levels = trained_levels(trajectory.sigmas, self.options.timestep_fraction)
        order = list(range(len(levels)))
        if self.options.shuffle_timesteps:
            generator = context.generator("nft_order", context.rollout_id, sample.index)
            order = torch.randperm(len(levels), generator=generator).tolist()
        weight = weight_of(sample)
        return [
            Pair(
                id=(sample.index, step),
                unit=sample.index,
                sigma=levels[step],
                weight=weight,
                tensors=clean,
                condition=sample.condition,
                values={
                    "advantage": advantage if weight > 0 else 0.0,
                    "levels": float(len(levels)),
                    "raw_reward": 0.0 if sample.reward is None else float(sample.reward),
                },
            )
            for step in order
        ]

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Return ``(1 - t) x0 + t noise``; the noise is a function of the pair's id."""
        noise = pair_noise(pairs, context, "nft_noise")
        streams = {
            stream: noised(clean, noise[stream], pairs.sigma_B)
            for stream, clean in pairs.tensors.items()
        }
        return ForwardInputs(streams=streams)

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the weighted sum of the pairs' losses, and the metrics of the step."""
        if predictions.old is None:
            raise ContractError("nft needs the prediction of the old policy, got none")
        zero_B = torch.zeros_like(pairs.weight_B)
        positive_B, negative_B, moved_B = zero_B, zero_B, zero_B
        for stream, trained in predictions.trained.items():
            new, old = trained.float(), predictions.old[stream].detach().float()
            plus, minus = implicit_policies(new, old, self.options.beta)
            for_stream = (pairs.tensors[stream], inputs.streams[stream], pairs.sigma_B)
            adaptive = self.options.adaptive_weight
            positive_B = positive_B + error_of(plus, *for_stream, adaptive=adaptive)
            negative_B = negative_B + error_of(minus, *for_stream, adaptive=adaptive)
            moved_B = moved_B + row_mean((new - old).detach().abs())
        advantage_B = self.clamped_advantage(pairs)
        r_B = optimality(advantage_B, self.adv_clip_max)
        contrast_B = r_B * positive_B + (1 - r_B) * negative_B
        policy_B = self.adv_clip_max * contrast_B / self.options.beta
        loss_B, levels_B = policy_B, pairs.values["levels"]
        figures_B = {
            "nft_loss": policy_B * levels_B,
            "nft_loss_per_pair": policy_B,
            "nft_r_mean": r_B,
            "nft_pos_loss": positive_B,
            "nft_neg_loss": negative_B,
            "nft_old_abs_diff": moved_B,
            "nft_adv_mean": advantage_B,
            "nft_t_mean": pairs.sigma_B,
            "nft_num_timesteps": levels_B,
            "adv_abs_mean": advantage_B.abs(),
        }
        if self.kl_beta > 0:
            reference = self.reference(predictions.reference)
            figures_B["kl_loss"] = kl_B = squared_distance(predictions.trained, reference)
            loss_B = policy_B + self.kl_beta * kl_B
        return LossOutput.weighted(loss_B, pairs.weight_B, figures_B)


def optimality(advantage_B: Tensor, limit: float) -> Tensor:
    """Return ``r = clamp(clamp(A, -m, m) / m / 2 + 0.5, 0, 1)``: how good a sample is, ``(B,)``."""
    return (advantage_B.clamp(-limit, limit) / limit / 2 + 0.5).clamp(0, 1)


def implicit_policies(new: Tensor, old: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return ``v+ = beta v_new + (1 - beta) v_old`` and ``v- = (1 + beta) v_old - beta v_new``."""
    return beta * new + (1 - beta) * old, (1 + beta) * old - beta * new


def error_of(
    velocity: Tensor, clean: Tensor, noised: Tensor, t_B: Tensor, *, adaptive: bool
) -> Tensor:
    """Return ``mean((x0' - x0)^2) / w`` with ``x0' = x_t - t v``, ``(B,)``.

    ``w = max(mean |x0' - x0|, 1e-5)``, in float64 and without gradient; 1 when not adaptive.
    """
    predicted = noised - over_rows(t_B, noised) * velocity
    squared = (predicted - clean) ** 2
    if not adaptive:
        return row_mean(squared)
    with torch.no_grad():
        distance_B = row_mean((predicted.double() - clean.double()).abs())
        weight_B = distance_B.clamp(min=SMALLEST_WEIGHT).to(squared.dtype)
    return row_mean(squared / over_rows(weight_B, squared))
