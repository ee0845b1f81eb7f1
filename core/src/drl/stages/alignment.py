"""The alignment probe: the engine's own tensors of each trained step beside what the trainer computes.

With ``debug.skip_optimizer_step`` the weights stand still, and every difference is one of the forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from drl.errors import ContractError
from drl.mathematics.transfer import stacked
from drl.types import (
    LossOutput,
    Metric,
    Pair,
    PairBatch,
    Predictions,
    Rollout,
    Sample,
    Shard,
    Streams,
)

if TYPE_CHECKING:
    from torch import Tensor

    from drl.run import Run

OUTPUT = "model_outputs"
"""Name of the guided model outputs among the engine's tensors."""

SMALLEST = 1e-30
"""Added to the divisor of a relative difference."""


def with_debug_tensors(run: Run, shards: Sequence[Shard], rollout: Rollout) -> Sequence[Shard]:
    """Give each pair the engine's tensors of its step; the shards themselves without ``engine_debug``."""
    if not run.recipe.debug.engine_debug:
        return shards
    samples = {sample.index: sample for sample in rollout.samples}
    return [
        replace(
            shard,
            windows=[
                [tuple(with_tensors(pair, samples) for pair in batch) for batch in window]
                for window in shard.windows
            ],
        )
        for shard in shards
    ]


def with_tensors(pair: Pair, samples: Mapping[int, Sample]) -> Pair:
    """Return a pair with the engine's tensors of its step; ContractError when it has no recorded one."""
    sample = samples.get(pair.unit)
    if sample is None or "step" not in pair.values:
        raise ContractError(
            f"debug.engine_debug: pair {pair.id} names no recorded step of a sample, so there is nothing "
            "to compare; set it to false"
        )
    return replace(pair, debug=tensors_of_step(sample, int(pair.values["step"])))


def tensors_of_step(sample: Sample, step: int) -> Streams:
    """Return the engine's tensors of one step; ContractError for what is missing or of another length."""
    trajectory = sample.trajectory
    if trajectory is None or OUTPUT not in trajectory.debug:
        raise ContractError(
            f"debug.engine_debug: sample {sample.index} came without '{OUTPUT}'; the engine, or the dump "
            "that is replayed, must have been asked for it"
        )
    steps = trajectory.timesteps.shape[0]
    for name, tensor in trajectory.debug.items():
        if tensor.shape[0] != steps:
            raise ContractError(
                f"debug.engine_debug: '{name}' of sample {sample.index} has {tensor.shape[0]} steps, its "
                f"trajectory {steps}"
            )
    return {name: tensor[step] for name, tensor in trajectory.debug.items()}


def with_alignment(batch: PairBatch, predictions: Predictions, output: LossOutput) -> LossOutput:
    """Add how far the trainer's model outputs are from the engine's, where pairs carry these.

    ``model_output_mean_abs_diff`` is over elements, the others are the largest of all rows with weight;
    ``model_output_rel_max`` is relative to the engine's largest output of the micro-batch.
    """
    if not batch.pairs[0].debug:
        return output
    if len(predictions.trained) != 1:
        raise ContractError("debug.engine_debug compares models with one stream")
    (trained,) = predictions.trained.values()
    engine = stacked([pair.debug[OUTPUT] for pair in batch.pairs], trained.device)
    figures = differences(trained.detach().float(), engine.float(), batch.weight_B)
    metrics = {
        "model_output_mean_abs_diff": figures[0],
        "model_output_max_abs_diff": figures[1],
        "model_output_rel_max": figures[2],
    }
    return replace(output, metrics={**output.metrics, **metrics})


def differences(trained: Tensor, engine: Tensor, weight_B: Tensor) -> tuple[Metric, Metric, Metric]:
    """Return mean, largest and relative largest difference of ``(B, *L)``; rows of weight 0 do not count."""
    counts_B = weight_B.gt(0).float()
    gap_BL = (trained - engine).abs().flatten(1)
    largest = (gap_BL.amax(1) * counts_B).max()
    size = (engine.abs().flatten(1).amax(1) * counts_B).max()
    one = torch.ones_like(largest)
    return (
        Metric(total=(gap_BL.mean(1) * counts_B).sum(), count=counts_B.sum(), by_component=True),
        Metric(total=largest, count=one, reduction="max"),
        Metric(total=largest / (size + SMALLEST), count=one, reduction="max"),
    )
