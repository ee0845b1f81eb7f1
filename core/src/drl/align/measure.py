"""Recorded steps scored by the trainer, beside what the engine recorded: differences per pair and per step.

The forward is that of training: gradients on, training mode, its micro-batches. ``Replay`` changes one of
these at a time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from drl.checkpoint.rng import TrainingRandomness
from drl.errors import ContractError
from drl.stages.alignment import OUTPUT, SMALLEST
from drl.stages.loss import (
    OLD,
    Forward,
    complete_inputs,
    make_batch,
    predict,
    score_transition,
    value_of,
)
from drl.stages.shards import filled
from drl.types import Pair, Predictions, StepContext, Streams

Batches = Sequence[Sequence[Pair]]
Around = Callable[[], AbstractContextManager[object]]

LARGEST_EXPONENT = 700.0
"""``exp`` of more overflows a double."""

DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
"""Modules that draw masks in training mode with a probability ``p``; others call it ``dropout``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One way to score recorded steps. ``around``: a context for the forwards; ``training``: their mode."""

    forward: Forward
    context: StepContext
    training: bool = True
    around: Around = nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigures:
    """One pair: the log-prob of the trainer and of the engine, and how far the model outputs are apart.

    The three of the outputs are over a pair's elements, ``output_rel`` the largest one relative to the
    engine's largest output; NaN where the engine returned none.
    """

    step: int
    sigma: float
    log_prob: float
    log_prob_old: float
    output_mean: float = math.nan
    output_max: float = math.nan
    output_rel: float = math.nan

    @property
    def log_prob_diff(self) -> float:
        """Return |new - old|."""
        return abs(self.log_prob - self.log_prob_old)

    @property
    def ratio_diff(self) -> float:
        """Return |ratio - 1|, the ratio being ``exp(new - old)``."""
        gap = self.log_prob - self.log_prob_old
        return math.inf if gap > LARGEST_EXPONENT else abs(math.expm1(gap))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The pairs of one denoising step: means and largest values of their differences; NaN stays NaN."""

    step: int
    sigma: float
    pairs: int
    log_prob_mean: float
    log_prob_max: float
    ratio_mean: float
    ratio_max: float
    output_mean: float
    output_max: float
    output_rel: float


def score(replay: Replay, batches: Batches) -> dict[tuple[int, ...], PairFigures]:
    """Return the figures of every pair with weight, by its id.

    What modules draw (dropout) begins at one seed each time: two ways to score differ by what was changed.
    """
    modes = {name: model.training for name, model in replay.forward.models.items()}
    found: dict[tuple[int, ...], PairFigures] = {}
    try:
        for model in replay.forward.models.values():
            model.train(replay.training)
        with TrainingRandomness(0, 0, replay.forward.device).in_place(), replay.around():
            for pairs in batches:
                found |= _score_batch(replay, pairs)
    finally:
        for name, model in replay.forward.models.items():
            model.train(modes[name])
    return found


def without_dropout(replay: Replay) -> Replay:
    """Return the same forward in evaluation mode where its modules draw masks, else ``replay`` itself.

    Forwards of other sizes draw other masks, so they can be compared without them alone.
    """
    modules = [module for model in replay.forward.models.values() for module in model.modules()]
    return replace(replay, training=False) if any(map(draws_masks, modules)) else replay


def draws_masks(module: nn.Module) -> bool:
    """True for a module that has dropout as an option that is on; a function called in its forward is not seen."""
    share = module.p if isinstance(module, DROPOUT) else getattr(module, "dropout", None)
    return isinstance(share, int | float) and share > 0


def _score_batch(replay: Replay, pairs: Sequence[Pair]) -> dict[tuple[int, ...], PairFigures]:
    forward = replay.forward
    batch = make_batch(pairs, forward.device)
    inputs = complete_inputs(forward, batch, forward.loss.prepare(batch, replay.context))
    velocity = {name: v.detach() for name, v in predict(forward, batch, inputs).items()}
    transition = score_transition(forward, batch, Predictions(trained=velocity))
    if transition is None:
        raise ContractError("only losses that score recorded steps can be compared with a rollout")
    new = transition.joint_log_prob.detach().tolist()
    outputs = output_differences(velocity, pairs)
    return {
        pair.id: PairFigures(
            step=int(pair.values.get("step", pair.id[-1])),
            sigma=pair.sigma,
            log_prob=log_prob,
            log_prob_old=value_of(pair, OLD),
            output_mean=mean,
            output_max=largest,
            output_rel=relative,
        )
        for pair, log_prob, (mean, largest, relative) in zip(pairs, new, outputs, strict=True)
        if pair.weight
    }


def output_differences(velocity: Streams, pairs: Sequence[Pair]) -> list[list[float]]:
    """Return mean, largest and relative largest difference of each pair's model output; NaN without one."""
    if len(velocity) != 1 or any(OUTPUT not in pair.debug for pair in pairs):
        return [[math.nan] * 3 for _ in pairs]
    (trained,) = velocity.values()
    engine = torch.stack([pair.debug[OUTPUT] for pair in pairs]).to(trained.device).float()
    gap_BN = (trained.float() - engine).abs().flatten(1)
    size_B = engine.abs().flatten(1).amax(1)
    figures_B3 = torch.stack(
        [gap_BN.mean(1), gap_BN.amax(1), gap_BN.amax(1) / (size_B + SMALLEST)], dim=1
    )
    rows: list[list[float]] = figures_B3.tolist()
    return rows


def by_step(figures: Mapping[tuple[int, ...], PairFigures]) -> list[StepFigures]:
    """Return the figures of each step, in order."""
    steps: dict[int, list[PairFigures]] = defaultdict(list)
    for one in figures.values():
        steps[one.step].append(one)
    return [_of_step(step, steps[step]) for step in sorted(steps)]


def _of_step(step: int, rows: Sequence[PairFigures]) -> StepFigures:
    log_probs = [row.log_prob_diff for row in rows]
    ratios = [row.ratio_diff for row in rows]
    return StepFigures(
        step=step,
        sigma=rows[0].sigma,
        pairs=len(rows),
        log_prob_mean=mean(log_probs),
        log_prob_max=largest(log_probs),
        ratio_mean=mean(ratios),
        ratio_max=largest(ratios),
        output_mean=mean([row.output_mean for row in rows]),
        output_max=largest([row.output_max for row in rows]),
        output_rel=largest([row.output_rel for row in rows]),
    )


def worst(figures: Mapping[tuple[int, ...], PairFigures]) -> float:
    """Return the largest difference of log-probs; NaN when one is NaN."""
    return largest([one.log_prob_diff for one in figures.values()])


def average(figures: Mapping[tuple[int, ...], PairFigures]) -> float:
    """Return the mean difference of log-probs."""
    return mean([one.log_prob_diff for one in figures.values()])


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def largest(values: Sequence[float]) -> float:
    """Return the largest value, NaN when one is NaN: it must not hide behind max."""
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=math.nan)


def rechunked(pairs: Sequence[Pair], rows: int) -> list[tuple[Pair, ...]]:
    """Return micro-batches of exactly ``rows`` pairs of one component each; the last ones are filled up."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.component].append(pair)
    return [
        filled(tuple(group[start : start + rows]), group[start], rows)
        for group in groups.values()
        for start in range(0, len(group), rows)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFigures:
    """The same pairs in forwards of ``rows`` rows: distance from the engine, and from the smallest forwards."""

    rows: int
    mean: float
    max: float
    spread: float


def over_rows(replay: Replay, pairs: Sequence[Pair], sizes: Sequence[int]) -> list[RowsFigures]:
    """Return how the log-probs of pairs depend on the number of rows of a forward; ``sizes`` ascend.

    Sizes from one on that does not fit into the device's memory are left out.
    """
    scores: dict[int, dict[tuple[int, ...], PairFigures]] = {}
    for rows in sizes:
        try:
            scores[rows] = score(replay, rechunked(pairs, rows))
        except torch.OutOfMemoryError:
            break
    first = next(iter(scores.values()), {})
    return [
        RowsFigures(
            rows=rows,
            mean=average(found),
            max=worst(found),
            spread=largest([abs(found[key].log_prob - first[key].log_prob) for key in found]),
        )
        for rows, found in scores.items()
    ]
