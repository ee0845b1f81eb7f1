"""A trainer of two parameters: what core does around a loss, small enough to check by hand.

The model's velocity is ``a x + b``; a step is Gaussian with std 0.5 around ``x + v dt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from drl.interfaces.loss import Loss
from drl.mathematics.gaussian import log_prob, over_rows
from drl.types import (
    LossOutput,
    Need,
    Pair,
    PairBatch,
    Predictions,
    ScoredTransition,
    StepContext,
    Streams,
    successor,
)

NOISE_STD = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one optimizer window: loss and gradient ``(2,)`` over the sum of weights, and each output."""

    loss: float
    gradient: Tensor
    weight: float
    outputs: list[LossOutput] = field(default_factory=list)


def batch_of(pairs: Sequence[Pair]) -> PairBatch:
    """Stack pairs into a micro-batch."""
    streams, names = pairs[0].tensors, pairs[0].values
    times = [pair.timestep for pair in pairs]
    return PairBatch(
        pairs=tuple(pairs),
        tensors={key: torch.stack([pair.tensors[key] for pair in pairs]) for key in streams},
        values={name: torch.tensor([pair.values[name] for pair in pairs]) for name in names},
        weight_B=torch.tensor([pair.weight for pair in pairs]),
        sigma_B=torch.tensor([pair.sigma for pair in pairs]),
        timestep_B=None if None in times else torch.tensor(times),
    )


def velocity(parameters: Tensor, streams: Streams) -> dict[str, Tensor]:
    """Return ``a x + b`` per stream."""
    return {name: parameters[0] * x + parameters[1] for name, x in streams.items()}


def scored(
    batch: PairBatch, streams: Streams, trained: Streams, reference: Streams
) -> ScoredTransition:
    """Score the recorded next latents under the Gaussian step."""
    std_B = torch.full_like(batch.sigma_B, NOISE_STD)
    dt_B = batch.values["sigma_next"] - batch.sigma_B
    means = {name: x + trained[name] * over_rows(dt_B, x) for name, x in streams.items()}
    return ScoredTransition(
        mean=means,
        std_dev_t_B=dict.fromkeys(streams, std_B),
        log_prob_B={
            name: log_prob(batch.tensors[successor(name)], mean, std_B)
            for name, mean in means.items()
        },
        reference_mean={
            name: x + reference[name] * over_rows(dt_B, x) for name, x in streams.items()
        },
    )


def run_batch(
    loss: Loss, pairs: Sequence[Pair], parameters: Tensor, context: StepContext
) -> LossOutput:
    """Run prepare, forward and compute on one micro-batch; old and reference have parameters 0.1."""
    batch = batch_of(pairs)
    inputs = loss.prepare(batch, context)
    trained = velocity(parameters, inputs.streams)
    other = velocity(torch.full((2,), 0.1), inputs.streams)
    transition = (
        scored(batch, inputs.streams, trained, other) if Need.TRANSITION in loss.needs else None
    )
    return loss.compute(
        batch, inputs, Predictions(trained=trained, old=other, reference=other), transition
    )


def run_window(
    loss: Loss, pairs: Sequence[Pair], parameters: Tensor, context: StepContext, rows: int
) -> Outcome:
    """Run a window in micro-batches of ``rows`` pairs, as the trainer does."""
    leaf = parameters.clone().requires_grad_()
    weight = sum(pair.weight for pair in pairs)
    outputs = [
        run_batch(loss, pairs[start : start + rows], leaf, context)
        for start in range(0, len(pairs), rows)
    ]
    total = torch.stack([output.loss for output in outputs]).sum() / weight
    (gradient,) = torch.autograd.grad(total, leaf)
    return Outcome(loss=float(total.detach()), gradient=gradient, weight=weight, outputs=outputs)


def log_prob_and_slope(pair: Pair, parameters: Tensor) -> tuple[float, Tensor]:
    """Return the log-probability of a pair's recorded step, and its gradient ``(2,)``."""
    leaf = parameters.clone().requires_grad_()
    batch = batch_of([pair])
    streams = {name: x for name, x in batch.tensors.items() if successor(name) in batch.tensors}
    trained = velocity(leaf, streams)
    total = torch.stack(list(scored(batch, streams, trained, trained).log_prob_B.values())).sum()
    (slope,) = torch.autograd.grad(total, leaf)
    return float(total.detach()), slope


def on_policy(pairs: Sequence[Pair], parameters: Tensor) -> list[Pair]:
    """Set the old log-probability of every pair to the value under these parameters."""
    return [
        replace(
            pair,
            values={**pair.values, "log_prob_old": log_prob_and_slope(pair, parameters)[0]},
        )
        for pair in pairs
    ]
