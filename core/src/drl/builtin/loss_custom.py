"""``custom_loss``: a loss that consists of the recipe's functions alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drl.api import (
    BadInput,
    Context,
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
)


class CustomLoss(Loss):
    """Holds what the recipe says that its functions need; core puts the functions in place of the rest."""

    def __init__(self, options: Any, context: Context) -> None:
        super().__init__(options, context)
        self.needs = frozenset(Need(need) for need in context.section.custom_needs)
        if context.section.kl_beta > 0:
            self.needs |= {Need.REFERENCE}

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        """Raise BadInput: the recipe names no function for this part."""
        raise _missing("rollout.custom_expand or rollout.custom_convert")

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Raise BadInput: the recipe names no function for this part."""
        raise _missing("algorithm.custom_prepare")

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Raise BadInput: the recipe names no function for this part."""
        raise _missing("algorithm.custom_loss")


def _missing(option: str) -> BadInput:
    return BadInput(f"algorithm.loss is 'custom_loss', which has no part of its own: set {option}")
