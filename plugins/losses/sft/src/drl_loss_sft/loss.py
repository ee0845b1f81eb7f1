"""Flow matching (arXiv 2210.02747): the model learns ``noise - x0`` from ``(1 - sigma) x0 + sigma noise``.

Axes: ``B`` rows, ``*L`` latent axes. Sigma and noise of a pair are functions of the run seed and the
sample's index alone, so neither ranks nor micro-batches change them; the index grows over the whole
run, so a row that comes again is drawn anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drl.api import (
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
)
from drl.mathematics.gaussian import row_mean
from drl.mathematics.noising import noised, pair_noise
from drl_loss_sft.sigmas import draw_from_grid, draw_logit_normal


class SftLoss(Loss):
    """Mean squared error of the velocity; streams are summed, conditions are positive only."""

    unit = "record"
    needs: frozenset[Need] = frozenset()

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        """Return one pair per encoded sample; its sigma is drawn here."""
        return [self._pair(sample, context) for sample in unit]

    def _pair(self, sample: Sample, context: StepContext) -> Pair:
        if sample.clean is None or sample.condition is None:
            missing = "clean latents" if sample.clean is None else "its condition"
            raise ContractError(
                f"sample {sample.index} lacks {missing}; sft_loss trains on samples that the data "
                "source gave media for and the family encoded"
            )
        generator = context.generator("sft_sigma", sample.index)
        if self.options.sigma == "grid":
            sigma = draw_from_grid(self.options.flow_shift, generator)
        else:
            sigma = draw_logit_normal(generator)
        return Pair(
            id=(sample.index,),
            unit=sample.index,
            sigma=sigma,
            weight=0.0 if sample.removed else 1.0,
            tensors=dict(sample.clean),
            condition=sample.condition,
        )

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Return the noised latents; ``extras`` holds the target of each stream."""
        noise = pair_noise(pairs, context, "sft_noise")
        streams, extras = {}, {}
        for stream, clean in pairs.tensors.items():
            streams[stream] = noised(clean, noise[stream], pairs.sigma_B)
            extras[target_of(stream)] = noise[stream] - clean
        return ForwardInputs(streams=streams, extras=extras)

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the weighted sum of ``mean((v - target)^2)``, and the loss by range of sigma."""
        loss_B = torch.stack(
            [
                row_mean((predicted.float() - inputs.extras[target_of(stream)]) ** 2)
                for stream, predicted in predictions.trained.items()
            ]
        ).sum(0)
        metrics = {"loss": _mean(loss_B, pairs.weight_B)}
        metrics |= by_sigma(loss_B, pairs.sigma_B, pairs.weight_B, self.options.sigma_buckets)
        return LossOutput(loss=(pairs.weight_B * loss_B).sum(), metrics=metrics)


def target_of(stream: str) -> str:
    """Key of a stream's target in ``ForwardInputs.extras``."""
    return f"{stream}.target"


def by_sigma(loss_B: Tensor, sigma_B: Tensor, weight_B: Tensor, buckets: int) -> dict[str, Metric]:
    """Return ``loss_sigma_<low>_<high>`` of every bucket, also of empty ones: ranks must agree on names."""
    place_B = (sigma_B * buckets).long().clamp(max=buckets - 1)
    return {
        f"loss_sigma_{place / buckets}_{(place + 1) / buckets}": _mean(
            loss_B, weight_B * (place_B == place)
        )
        for place in range(buckets)
    }


def _mean(values_B: Tensor, weight_B: Tensor) -> Metric:
    return Metric(total=(weight_B * values_B.detach()).sum(), count=weight_B.sum())
