"""The recipe's own functions on the way from rewards to gradients, and what they must return."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from drl.errors import BadInput
from drl.interfaces.loss import Loss
from drl.types import (
    Advantages,
    ForwardInputs,
    LossOutput,
    Pair,
    PairBatch,
    Predictions,
    Sample,
    ScoredTransition,
    StepContext,
)

if TYPE_CHECKING:
    from drl.functions import Functions
    from drl.run import Run
    from drl.stages.shards import Unit

CONVERT = "rollout.custom_convert"
EXPAND = "rollout.custom_expand"
POST_PROCESS = "reward.custom_post_process"
PREPARE = "algorithm.custom_prepare"
FORMULA = "algorithm.custom_loss"


def chosen_units(
    run: Run, samples: Sequence[Sample], advantages: Sequence[float] | None
) -> list[Unit] | None:
    """Return the units that a function of the recipe makes of the samples; None without one.

    ``rollout.custom_convert`` wins over ``rollout.custom_expand``. Raises BadInput for anything but
    sequences of pairs with finite weights and ids of their own.
    """
    convert, expand = run.functions.get(CONVERT), run.functions.get(EXPAND)
    if convert is not None:
        return checked_units(convert(run, samples), CONVERT)
    if expand is not None:
        rewards = [sample.reward for sample in samples]
        return checked_units(expand(run, samples, advantages, rewards), EXPAND)
    return None


def checked_units(units: Any, option: str) -> list[Unit]:
    """Return what a function returned, when it is units of pairs; BadInput says what it is instead."""
    if not _is_list(units) or not all(_is_list(unit) for unit in units):
        raise BadInput(
            f"{option} must return one list of pairs per unit (a sample, or what must stay in one "
            f"optimizer step), got {_shown(units)}"
        )
    ids, names = set(), None
    for pair in (pair for unit in units for pair in unit):
        if not isinstance(pair, Pair):
            raise BadInput(f"{option} must return drl.api.Pair objects, got {_shown(pair)}")
        if not (math.isfinite(pair.weight) and pair.weight >= 0):
            raise BadInput(
                f"{option}: pair {pair.id} has weight {pair.weight}; use 1, or 0 to leave it out"
            )
        if pair.id in ids:
            raise BadInput(
                f"{option}: two pairs have the id {pair.id}; noise is drawn by id, so each needs its own"
            )
        ids.add(pair.id)
        here = sorted(pair.tensors), sorted(pair.values)
        names = names or here
        if here != names:
            raise BadInput(
                f"{option}: pair {pair.id} has the tensors and values {here}, the first pair {names}; "
                "all pairs need the same"
            )
    return list(units)


def processed_rewards(run: Run, samples: Sequence[Sample]) -> Advantages | None:
    """Return what ``reward.custom_post_process`` makes of the rewards; None without that function.

    The raw values become the samples' rewards. A sample without a reward stays without one, and its
    advantage is 0.
    """
    process = run.functions.get(POST_PROCESS)
    if process is None:
        return None
    raw, normalised = _both(process(run, samples))
    for name, values in (("raw", raw), ("normalised", normalised)):
        if len(values) != len(samples):
            raise BadInput(
                f"{POST_PROCESS} must return one {name} reward per sample ({len(samples)}), got "
                f"{len(values)}"
            )
    import torch

    known = [sample.reward is not None for sample in samples]
    for sample, reward, value in zip(samples, raw, normalised, strict=True):
        if sample.reward is None:
            continue
        if not (math.isfinite(float(reward)) and math.isfinite(float(value))):
            raise BadInput(
                f"{POST_PROCESS}: sample {sample.index} has the raw reward {reward} and the normalised "
                f"reward {value}; both must be finite"
            )
        sample.reward = float(reward)
    kept = [float(v) if here else 0.0 for v, here in zip(normalised, known, strict=True)]
    return Advantages(values=torch.tensor(kept, dtype=torch.float32))


def _both(result: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise BadInput(
            f"{POST_PROCESS} must return two lists, raw and normalised rewards, got {_shown(result)}"
        )
    raw, normalised = (_as_list(values) for values in result)
    return raw, normalised


def _as_list(values: Any) -> Sequence[Any]:
    """Take arrays and tensors too, whose elements are numbers once they are a list."""
    import numpy as np

    return list(np.asarray(values, dtype=np.float64).reshape(-1))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"[:120]


class FunctionLoss(Loss):
    """A loss of which functions of the recipe replace ``prepare``, the formula, or both."""

    def __init__(
        self,
        loss: Loss,
        prepare: Callable[..., Any] | None,
        formula: Callable[..., Any] | None,
    ) -> None:
        super().__init__(loss.options, loss.context)
        self.loss = loss
        self.model_kind, self.unit, self.needs = loss.model_kind, loss.unit, loss.needs
        self.recomputes_old_log_prob = loss.recomputes_old_log_prob
        self.ratio_width = loss.ratio_width if formula is None else None
        self._prepare = loss.prepare if prepare is None else prepare
        self._compute = loss.compute if formula is None else formula

    def expand(
        self,
        unit: Sequence[Sample],
        advantages: Sequence[float] | None,
        context: StepContext,
    ) -> list[Pair]:
        """Let the loss itself expand."""
        return self.loss.expand(unit, advantages, context)

    def prepare(self, pairs: PairBatch, context: StepContext) -> ForwardInputs:
        """Call the chosen function, or the loss; BadInput when that returns no inputs."""
        inputs = self._prepare(pairs, context)
        if not isinstance(inputs, ForwardInputs):
            raise BadInput(f"{PREPARE} must return drl.api.ForwardInputs, got {_shown(inputs)}")
        return inputs

    def compute(
        self,
        pairs: PairBatch,
        inputs: ForwardInputs,
        predictions: Predictions,
        transition: ScoredTransition | None,
    ) -> LossOutput:
        """Call the chosen formula, or the loss's; BadInput unless it returns a scalar with a gradient."""
        output = self._compute(pairs, inputs, predictions, transition)
        if not isinstance(output, LossOutput):
            raise BadInput(f"{FORMULA} must return drl.api.LossOutput, got {_shown(output)}")
        if output.loss.dim() != 0:
            raise BadInput(
                f"{FORMULA} must return one number, the sum of weight times loss over the rows, got a "
                f"loss of shape {tuple(output.loss.shape)}"
            )
        return output


def with_functions(loss: Loss, functions: Functions) -> Loss:
    """Return the loss with the parts that the recipe replaces by functions of its own."""
    prepare, formula = functions.get(PREPARE), functions.get(FORMULA)
    if prepare is None and formula is None:
        return loss
    return FunctionLoss(loss, prepare, formula)
