"""Diffusion-DPO (Wallace et al. 2023, arXiv 2311.12908, equation 14) for flow models.

Axes: ``B`` preferences, ``*L`` latent axes; errors of several streams are summed. With one noise level
and one noise for both pictures, ``e = mean((v - (noise - x0))^2)`` and a gain ``g = e_ref - e``::

    loss = -log sigmoid(beta / 2 (g_chosen - g_rejected))

The velocity's error stands for that of the noise: at one level the two differ by a factor, which like
the paper's ``T omega(lambda)`` is part of ``beta``, the same at every level. The mean over elements, not
the sum, and the 1/2 are those of the authors' training script, so its values of ``beta`` carry over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from drl.api import (
    ContractError,
    ForwardInputs,
    Loss,
    LossOutput,
    Need,
    Pair,
    PairBatch,
    Predictions,
    Sample,
    ScoredTransition,
    StepContext,
    Streams,
    rejected,
)
from drl.mathematics.noising import noised, pair_noise, target_of, velocity_error
from drl.mathematics.recorded import encoded
from drl_loss_dpo.levels import draw_sigma

TRAINS_ON = "dpo trains on samples that the data source gave two media for and the family encoded"


class Dpo(Loss):
    """One pair per preference; the model sees 2B rows, the chosen pictures before the rejected ones."""

    unit = "record"
    needs = frozenset({Need.REFERENCE})
    rows_per_pair = 2

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        """Return one pair per encoded preference; its noise level is drawn here."""
        return [self._pair(sample, context) for sample in unit]

    def _pair(self, sample: Sample, context: StepContext) -> Pair:
        clean, condition = encoded(sample, TRAINS_ON)
        for stream, chosen in chosen_of(clean).items():
            worse = clean.get(rejected(stream))
            if worse is None or worse.shape != chosen.shape:
                found = "none" if worse is None else f"{tuple(worse.shape)}"
                raise ContractError(
                    f"sample {sample.index}: the rejected latents of '{stream}' must have the shape of the "
                    f"chosen ones, {tuple(chosen.shape)}, got {found}"
                )
        generator = context.generator("dpo_sigma", sample.index)
        return Pair(
            id=(sample.index,),
            unit=sample.index,
            sigma=draw_sigma(self.options.sigma, self.options.flow_shift, generator),
            weight=0.0 if sample.removed else 1.0,
            tensors=dict(clean),
            condition=condition,
        )

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Return both noised latents of each preference; ``extras`` holds their targets."""
        chosen = chosen_of(pairs.tensors)
        noise = pair_noise(replace(pairs, tensors=chosen), context, "dpo_noise")
        streams, targets = {}, {}
        for stream, better in chosen.items():
            both = (better, pairs.tensors[rejected(stream)])
            streams[stream] = torch.cat([noised(x, noise[stream], pairs.sigma_B) for x in both])
            targets[target_of(stream)] = torch.cat([noise[stream] - x for x in both])
        return ForwardInputs(streams=streams, extras=targets, rows_per_pair=2)

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the weighted sum of the preferences' losses, and the metrics of the step."""
        if predictions.reference is None:
            raise ContractError("dpo needs the prediction of the reference, got none")
        before = velocity_error(predictions.reference, inputs).detach()
        chosen_B, rejected_B = (before - velocity_error(predictions.trained, inputs)).chunk(2)
        margin_B = self.options.beta / 2 * (chosen_B - rejected_B)
        figures_B = {
            "dpo_accuracy": accuracy_of(margin_B),
            "dpo_margin": margin_B,
            "dpo_chosen_gain": chosen_B,
            "dpo_rejected_gain": rejected_B,
        }
        return LossOutput.weighted(softplus(-margin_B), pairs.weight_B, figures_B)


def chosen_of(tensors: Streams) -> Streams:
    """Return the streams without what was rejected."""
    worse = {rejected(stream) for stream in tensors}
    return {stream: tensor for stream, tensor in tensors.items() if stream not in worse}


def accuracy_of(margin_B: Tensor) -> Tensor:
    """Return ``(B,)``: 1 where the trained model prefers the chosen picture, 1/2 where it cannot tell."""
    return (margin_B.sign() + 1) / 2
