"""Flow matching (arXiv 2210.02747): the model learns ``noise - x0`` from ``(1 - sigma) x0 + sigma noise``.

Axes: ``B`` rows, ``*L`` latent axes. Sigma and noise of a pair are functions of the run seed and the
sample's index alone, so neither ranks nor micro-batches change them; the index grows over the whole
run, so a row that comes again is drawn anew. Of a model with several components one trains in each
optimizer step, drawn from the step's number: ranks must run the same module at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Generator, Tensor

from drl.api import (
    BadInput,
    ForwardInputs,
    Loss,
    LossOutput,
    Metric,
    Need,
    Pair,
    PairBatch,
    Predictions,
    Routes,
    Sample,
    ScoredTransition,
    StepContext,
)
from drl.mathematics.noising import logit_normal_level, noised_with_targets, velocity_error
from drl.mathematics.recorded import encoded
from drl_loss_sft.sigmas import GRID_POINTS, draw_from_grid

TRAINS_ON = "sft_loss trains on samples that the data source gave media for and the family encoded"
DRAWS = 10_000
"""Noise levels drawn at most until one belongs to the component that trains."""


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
        clean, condition = encoded(sample, TRAINS_ON)
        sigma = self._sigma(context.generator("sft_sigma", sample.index), context)
        return Pair(
            id=(sample.index,),
            unit=sample.index,
            sigma=sigma,
            timestep=None if context.routes is None else timestep_of(sigma),
            weight=0.0 if sample.removed else 1.0,
            tensors=dict(clean),
            condition=condition,
        )

    def _sigma(self, generator: Generator, context: StepContext) -> float:
        """Draw a noise level; where the model has several components, one of the window's component."""
        routes = context.routes
        if routes is None:
            return self._draw(generator)
        choice = context.generator("sft_component", context.rollout_id, context.window)
        sigma = self._draw_of(routes, routes.components, choice)
        component = routes.component_at(timestep_of(sigma))
        return self._draw_of(routes, (component,), generator)

    def _draw_of(self, routes: Routes, components: Sequence[str], generator: Generator) -> float:
        """Draw until the level is one of these components': its chance is then its share of the levels."""
        for _ in range(DRAWS):
            sigma = self._draw(generator)
            if routes.component_at(timestep_of(sigma)) in components:
                return sigma
        raise BadInput(
            f"model.components: none of {DRAWS} noise levels of sft_loss belongs to {', '.join(components)}; "
            "train a component that the family routes some of them to"
        )

    def _draw(self, generator: Generator) -> float:
        if self.options.sigma == "grid":
            return draw_from_grid(self.options.flow_shift, generator)
        return logit_normal_level(generator)

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Return the noised latents; ``extras`` holds the target of each stream."""
        return noised_with_targets(pairs, context, "sft_noise")

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the weighted sum of ``mean((v - target)^2)``, and the loss by range of sigma."""
        loss_B = velocity_error(predictions.trained, inputs)
        output = LossOutput.weighted(loss_B, pairs.weight_B, {})
        buckets = by_sigma(loss_B, pairs.sigma_B, pairs.weight_B, self.options.sigma_buckets)
        return LossOutput(loss=output.loss, metrics={**output.metrics, **buckets})


def timestep_of(sigma: float) -> float:
    """Return the timestep of a noise level, 0 to 1000."""
    return sigma * GRID_POINTS


def by_sigma(loss_B: Tensor, sigma_B: Tensor, weight_B: Tensor, buckets: int) -> dict[str, Metric]:
    """Return ``loss_sigma_<low>_<high>`` of every bucket, also of empty ones: ranks must agree on names."""
    place_B = (sigma_B * buckets).long().clamp(max=buckets - 1)
    return {
        f"loss_sigma_{place / buckets}_{(place + 1) / buckets}": Metric.weighted(
            loss_B, weight_B * (place_B == place)
        )
        for place in range(buckets)
    }
