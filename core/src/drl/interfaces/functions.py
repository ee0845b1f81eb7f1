"""Protocols of the functions that a recipe may name: one per slot of ``drl.kinds.SLOTS``.

Their signatures are the contract that ``drl config check`` compares a function with: what stands before
``/`` is given by position, so a function names its arguments as it likes; what stands after ``*`` is given
by name, and only to a function that takes it. ``run.recipe`` has the options. An ``async def`` here asks
for an ``async def`` there. Functions of ``rollout``, ``eval`` and ``reward`` run in the driver, those of
``algorithm`` and ``model`` on every rank of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from drl.types import (
    Dropped,
    ForwardInputs,
    Group,
    LossOutput,
    Pair,
    PairBatch,
    Predictions,
    Rollout,
    RolloutRequest,
    Sample,
    Sampling,
    ScoredTransition,
    StepContext,
)

if TYPE_CHECKING:
    from torch import nn

    from drl.interfaces.data import DataSource
    from drl.interfaces.family import Family, WeightSource
    from drl.run import Run

__all__ = [
    "BufferFilter",
    "CustomConvert",
    "CustomEvalLog",
    "CustomExpand",
    "CustomGenerate",
    "CustomLog",
    "CustomLoss",
    "CustomPostProcess",
    "CustomPrepare",
    "CustomReward",
    "DynamicSamplingFilter",
    "ModelBackend",
    "RolloutFunction",
    "SampleFilter",
]


class RolloutFunction(Protocol):
    """Make a whole rollout, or with ``evaluation`` the samples of every evaluation set by its name."""

    def __call__(
        self, run: Run, rollout_id: int, data_source: DataSource, /, *, evaluation: bool = False
    ) -> Rollout | Mapping[str, Sequence[Sample]]:
        """Return scored groups; what they hold is checked like a rollout of drl's own."""


class CustomGenerate(Protocol):
    """Turn one microgroup's request into its samples, instead of one request to the engine."""

    async def __call__(
        self,
        run: Run,
        request: RolloutRequest,
        sampling: Sampling,
        /,
        *,
        evaluation: bool = False,
    ) -> list[Sample]:
        """Return the samples of ``request`` in the order of its members; not scored yet."""


class DynamicSamplingFilter(Protocol):
    """Decide about a group as soon as its last score has arrived."""

    def __call__(self, run: Run, group: Group, /) -> bool | Dropped | tuple[bool, str]:
        """Return True to keep; False, ``Dropped(reason)`` or ``(False, reason)`` to draw another."""


class SampleFilter(Protocol):
    """Take single samples of kept groups out of the loss; they still count for advantages."""

    def __call__(self, run: Run, groups: Sequence[Group], /) -> None:
        """Set ``sample.remove_sample = True`` where a sample is not trained on."""


class BufferFilter(Protocol):
    """Choose the groups that leave the buffer of a data source."""

    def __call__(
        self, run: Run, rollout_id: int | None, buffer: list[Group], count: int, /
    ) -> list[Group]:
        """Return at most ``count`` groups and take them out of ``buffer``."""


class CustomConvert(Protocol):
    """Turn scored samples into training pairs; replaces advantages and expansion."""

    def __call__(self, run: Run, samples: Sequence[Sample], /) -> Sequence[Sequence[Pair]]:
        """Return units of pairs; the pairs of a unit stay in one optimizer step."""


class CustomExpand(Protocol):
    """Turn samples and their advantages into training pairs, instead of the loss's ``expand``."""

    def __call__(
        self,
        run: Run,
        samples: Sequence[Sample],
        advantages: Sequence[float] | None,
        rewards: Sequence[float | None],
        /,
    ) -> Sequence[Sequence[Pair]]:
        """Return units of pairs; ``advantages`` and ``rewards`` stand in the order of ``samples``."""


class CustomLog(Protocol):
    """See an iteration's samples before its row is logged."""

    def __call__(
        self,
        rollout_id: int,
        run: Run,
        samples: Sequence[Sample],
        extra_metrics: dict[str, float],
        rollout_time: float,
        /,
    ) -> bool:
        """Add to ``extra_metrics``; return True to leave out drl's own rollout figures."""


class CustomEvalLog(Protocol):
    """See an evaluation's samples, by set, before its figures are logged."""

    def __call__(
        self,
        rollout_id: int,
        run: Run,
        data: Mapping[str, Sequence[Sample]],
        extra_metrics: dict[str, float],
        /,
    ) -> bool:
        """Add to ``extra_metrics``; return True to leave out drl's own evaluation figures."""


class CustomPrepare(Protocol):
    """Make the model's inputs of a micro-batch, instead of the loss's ``prepare``."""

    def __call__(self, pairs: PairBatch, context: StepContext, /) -> ForwardInputs:
        """Leave ``condition``, ``negative`` and ``guidance`` unset: core fills them in."""


class CustomLoss(Protocol):
    """The loss formula of ``algorithm.loss = "custom_loss"``; forwards stay core's."""

    def __call__(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
        /,
    ) -> LossOutput:
        """Return the sum of weight times loss over the rows, and the metrics."""


class CustomReward(Protocol):
    """Score samples in the driver, a batch at a time."""

    async def __call__(self, run: Run, samples: Sequence[Sample], /) -> Sequence[float]:
        """Return one score per sample, in their order."""


class CustomPostProcess(Protocol):
    """Turn rewards into advantages, instead of the advantage estimator."""

    def __call__(
        self, run: Run, samples: Sequence[Sample], /
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Return raw and normalised rewards, one each per sample; the normalised are trained on."""


class ModelBackend(Protocol):
    """Load a component for training, instead of the family's ``build``; the engine's stays as it is."""

    def __call__(self, family: Family, component: str, source: WeightSource, /) -> nn.Module:
        """Return the component as ``family.build`` would, on the meta device when ``source.meta``."""
