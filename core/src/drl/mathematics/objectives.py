"""What losses on generated samples share: pairs with an advantage, recorded steps, a KL term.

Axes: ``B`` rows (pairs), ``*L`` latent axes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from drl.api import (
    BadInput,
    Context,
    ContractError,
    ForwardInputs,
    Loss,
    Need,
    Pair,
    PairBatch,
    Sample,
    ScoredTransition,
    StepContext,
    Streams,
    successor,
)
from drl.mathematics.gaussian import row_mean
from drl.mathematics.recorded import recorded_pairs


class AdvantageLoss(Loss):
    """A loss whose rows carry the advantage of their sample; a KL term asks for a reference."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.kl_beta: float = context.section.kl_beta
        self.adv_clip_max: float = context.section.adv_clip_max
        if self.kl_beta > 0:
            self.needs |= {Need.REFERENCE}

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        """Return the pairs of each sample of the unit; ContractError without an advantage for each."""
        if advantages is None:
            raise ContractError(f"{type(self).__name__} needs one advantage per sample, got none")
        return [
            pair
            for sample, advantage in zip(unit, advantages, strict=True)
            for pair in self.pairs_of(sample, advantage, context)
        ]

    @abstractmethod
    def pairs_of(self, sample: Sample, advantage: float, context: StepContext) -> list[Pair]:
        """Return the pairs of one sample, in a fixed order, with the value ``advantage``."""

    def clamped_advantage(self, pairs: PairBatch) -> Tensor:
        """Return the advantages within ± ``adv_clip_max``, ``(B,)``."""
        return pairs.values["advantage"].clamp(-self.adv_clip_max, self.adv_clip_max)

    def reference(self, streams: Streams | None) -> Streams:
        """Return what the reference predicts; BadInput when no reference ran."""
        if streams is None:
            raise BadInput(
                f"algorithm.kl_beta is {self.kl_beta}, but there is no reference prediction; set "
                'algorithm.ref_mode = "lora_base" or "ema", or algorithm.kl_beta = 0'
            )
        return streams


class RecordedLoss(AdvantageLoss):
    """A loss on the recorded stochastic steps of a sample, scored under the trained weights."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.divides_by_noise = self.kl_beta > 0  # see gaussian_kl

    def pairs_of(self, sample: Sample, advantage: float, context: StepContext) -> list[Pair]:
        """Return one pair per stochastic step."""
        return recorded_pairs(sample, advantage, context.sigmas)

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Feed the recorded latents of the step."""
        streams = {name: x for name, x in pairs.tensors.items() if successor(name) in pairs.tensors}
        return ForwardInputs(streams=streams)

    def scored(self, transition: ScoredTransition | None) -> ScoredTransition:
        """Return the scored transition; ContractError when core scored none."""
        if transition is None:
            raise ContractError(f"{type(self).__name__} needs the scored transition, got none")
        return transition

    def gaussian_kl(self, transition: ScoredTransition) -> Tensor:
        """Return ``mean_nb((mu - mu_ref)^2) / (2 std_dev_t^2)``, ``(B,)`` float32, streams summed.

        ``std_dev_t`` without the ``sqrt(-dt)`` of the noise, as Flow-GRPO's SD3, Flux and Qwen trainers.
        It is above 0: core looked at all steps before training (``divides_by_noise``).
        """
        reference = self.reference(transition.reference_mean)
        distances = [
            row_mean((mean - reference[stream].detach()) ** 2)
            / (2 * transition.std_dev_t_B[stream] ** 2)
            for stream, mean in transition.mean.items()
        ]
        return reduce(add, distances)


def new_and_old_log_prob(pairs: PairBatch, transition: ScoredTransition) -> tuple[Tensor, Tensor]:
    """Return the log-prob of the recorded steps now and under the policy that made them, ``(B,)`` each.

    Rows of weight 0 may hold anything: NaN or inf of theirs must not reach a sum, so both are equal there.
    """
    new_B = transition.joint_log_prob
    old_B = torch.where(pairs.weight_B > 0, pairs.values["log_prob_old"], new_B.detach())
    return new_B, old_B


def clipped_policy_loss(advantage_B: Tensor, ratio_B: Tensor, clip_range: float) -> Tensor:
    """Return ``max(-A ratio, -A clamp(ratio, 1 - c, 1 + c))``, ``(B,)`` float32 (arXiv 1707.06347)."""
    clipped_B = ratio_B.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantage_B * ratio_B, -advantage_B * clipped_B)
