"""Advantage weighted matching (arXiv 2509.25050): pre-training's loss on what the model just sampled.

``E[A mean_nb((v(x_s) - (noise - x0))^2)]`` with ``x_s = (1 - s) x0 + s noise``: the squared error bounds
``-log p(x0)``, so its gradient weighted by the advantage is a policy gradient whose variance the steps
of the sampler do not enter. All noise levels weigh the same; ``kl_beta`` adds
``mean_nb((v - v_ref)^2)``. One step on-policy: the paper's ratio is 1 there, with this gradient.

Axes: ``B`` rows (pairs), ``*L`` latent axes.
"""

from __future__ import annotations

from drl.api import (
    ForwardInputs,
    LossOutput,
    Need,
    Pair,
    PairBatch,
    Predictions,
    Sample,
    ScoredTransition,
    StepContext,
    Trajectory,
)
from drl.mathematics.noising import noised_with_targets, squared_distance, velocity_error
from drl.mathematics.objectives import AdvantageLoss
from drl.mathematics.recorded import final_latents, weight_of
from drl.mathematics.steps import share_of_steps
from drl_loss_awm.levels import logit_normal, step_numbers


class Awm(AdvantageLoss):
    """``A`` times the flow-matching error of a generated sample, at some noise levels each."""

    needs = frozenset({Need.ROLLOUT})

    def pairs_of(self, sample: Sample, advantage: float, context: StepContext) -> list[Pair]:
        """Return a pair per noise level; the members of a group share their levels."""
        trajectory, clean = final_latents(sample)
        weight = weight_of(sample)
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
        return noised_with_targets(pairs, context, "awm_noise")

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the weighted sum of the pairs' losses, and the metrics of the step."""
        matching_B = velocity_error(predictions.trained, inputs)
        advantage_B = self.clamped_advantage(pairs)
        loss_B = advantage_B * matching_B
        figures_B = {
            "policy_loss": loss_B,
            "matching_loss": matching_B,
            "adv_abs_mean": advantage_B.abs(),
        }
        if self.kl_beta > 0:
            reference = self.reference(predictions.reference)
            figures_B["kl_loss"] = kl_B = squared_distance(predictions.trained, reference)
            loss_B = loss_B + self.kl_beta * kl_B
        return LossOutput.weighted(loss_B, pairs.weight_B, figures_B)
