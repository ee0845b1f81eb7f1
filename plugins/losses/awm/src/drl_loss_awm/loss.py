"""Advantage weighted matching (arXiv 2509.25050): pre-training's loss on what the model just sampled.

``E[A mean_nb((v(x_s) - (noise - x0))^2)]`` with ``x_s = (1 - s) x0 + s noise``: the squared error bounds
``-log p(x0)``, so its gradient weighted by the advantage is a policy gradient whose variance the steps
of the sampler do not enter. All noise levels weigh the same; ``kl_beta`` adds
``mean_nb((v - v_ref)^2)``. One step on-policy: the paper's ratio is 1 there, with this gradient.

Axes: ``B`` rows (pairs), ``*L`` latent axes.
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
    Streams,
    Trajectory,
)
from drl.mathematics.gaussian import row_mean
from drl.mathematics.noising import noised, pair_noise
from drl.mathematics.recorded import final_latents
from drl.mathematics.steps import share_of_steps
from drl_loss_awm.levels import logit_normal, step_numbers


class Awm(Loss):
    """``A`` times the flow-matching error of a generated sample, at some noise levels each."""

    needs = frozenset({Need.ROLLOUT})

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.kl_beta: float = context.section.kl_beta
        self.adv_clip_max: float = context.section.adv_clip_max
        if self.kl_beta > 0:
            self.needs = Awm.needs | {Need.REFERENCE}

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        """Return a pair per noise level of a sample; the members of a group share their levels."""
        if advantages is None:
            raise ContractError("awm needs one advantage per sample, got none")
        return [
            pair
            for sample, advantage in zip(unit, advantages, strict=True)
            for pair in self._pairs(sample, advantage, context)
        ]

    def _pairs(self, sample: Sample, advantage: float, context: StepContext) -> list[Pair]:
        trajectory, clean = final_latents(sample)
        weight = 0.0 if sample.removed or sample.reward is None else 1.0
        return [
            Pair(
                id=(sample.index, place),
                unit=sample.index,
                sigma=sigma,
                timestep=timestep,
                weight=weight,
                tensors=clean,
                condition=sample.condition,
                values={"advantage": advantage if weight > 0 else 0.0},
            )
            for place, (sigma, timestep) in enumerate(self._levels(trajectory, sample, context))
        ]

    def _levels(
        self, trajectory: Trajectory, sample: Sample, context: StepContext
    ) -> list[tuple[float, float | None]]:
        generator = context.generator("awm_levels", sample.group_index)
        timesteps = trajectory.timesteps.tolist()
        count = share_of_steps(len(timesteps), self.options.step_share)
        if self.options.sigma == "logit_normal":
            sigmas = logit_normal(count, self.options.flow_shift, generator).tolist()
            return [(sigma, None) for sigma in sigmas]
        limit = share_of_steps(len(timesteps), self.options.timestep_fraction)
        numbers = step_numbers(limit, count, generator)
        return [(float(trajectory.sigmas[number]), timesteps[number]) for number in numbers]

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Return the noised latents; ``extras`` holds the target of each stream."""
        noise = pair_noise(pairs, context, "awm_noise")
        streams, targets = {}, {}
        for stream, clean in pairs.tensors.items():
            streams[stream] = noised(clean, noise[stream], pairs.sigma_B)
            targets[target_of(stream)] = noise[stream] - clean
        return ForwardInputs(streams=streams, extras=targets)

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the weighted sum of the pairs' losses, and the metrics of the step."""
        targets = {name: inputs.extras[target_of(name)] for name in predictions.trained}
        matching_B = squared_distance(predictions.trained, targets)
        advantage_B = pairs.values["advantage"].clamp(-self.adv_clip_max, self.adv_clip_max)
        loss_B = advantage_B * matching_B
        figures_B = {"policy_loss": loss_B, "matching_loss": matching_B}
        if self.kl_beta > 0:
            if predictions.reference is None:
                raise BadInput(
                    f"algorithm.kl_beta is {self.kl_beta}, but there is no reference prediction; set "
                    'algorithm.ref_mode = "lora_base" or "ema", or algorithm.kl_beta = 0'
                )
            figures_B["kl_loss"] = kl_B = squared_distance(
                predictions.trained, predictions.reference
            )
            loss_B = loss_B + self.kl_beta * kl_B
        figures_B |= {"loss": loss_B, "adv_abs_mean": advantage_B.abs()}
        metrics = {
            name: Metric(
                total=(pairs.weight_B * values_B.detach()).sum(), count=pairs.weight_B.sum()
            )
            for name, values_B in figures_B.items()
        }
        return LossOutput(loss=(pairs.weight_B * loss_B).sum(), metrics=metrics)


def target_of(stream: str) -> str:
    """Key of a stream's target in ``ForwardInputs.extras``."""
    return f"{stream}.target"


def squared_distance(one: Streams, other: Streams) -> Tensor:
    """Return ``mean_nb((one - other)^2)``, ``(B,)`` float32, streams summed; ``other`` has no gradient."""
    distances = [
        row_mean((x.float() - other[stream].detach().float()) ** 2) for stream, x in one.items()
    ]
    return torch.stack(distances).sum(0)
