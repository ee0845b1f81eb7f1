"""``Loss``: which pairs a sample becomes, what the model is fed, and what the loss of a row is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from drl.types import (
    Context,
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


class Loss(ABC):
    """A training objective. Core runs the forward, guidance, old and reference passes and the step.

    Constructed as ``Loss(options, context)``; ``context.section`` is the recipe's ``[algorithm]``
    (``kl_beta``, ``adv_clip_max``, ``ref_mode``). ``needs`` may be narrowed in ``__init__``.
    ``recomputes_old_log_prob``: core replaces ``pairs.values["log_prob_old"]`` by the trainer's own value
    of before the rollout's first optimizer step, and keeps the engine's as ``"log_prob_rollout"``.
    ``divides_by_noise``: core refuses recorded steps without noise before it trains on them.
    ``rows_per_pair``: rows of a forward that ``prepare`` makes of one pair, for counting work.
    ``ratio_width``: how far the ratio of new to old probability may be from 1 before it is clipped; core says when
    rounding alone exceeds it. None: nothing is clipped by that.
    """

    model_kind: str = "diffusion"
    unit: str = "sample"
    needs: frozenset[Need] = frozenset()
    recomputes_old_log_prob: bool = False
    divides_by_noise: bool = False
    rows_per_pair: int = 1
    ratio_width: float | None = None

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        """Turn one unit (a sample, a group, a record) into its pairs, in a fixed order."""

    @abstractmethod
    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Make the model's inputs; noise comes from ``context.generator(purpose, *pair.id)``.

        Leave ``conditions`` and ``guidance`` unset: core fills them in.
        """

    @abstractmethod
    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Return the sum of weight times loss over the rows, and the metrics."""
