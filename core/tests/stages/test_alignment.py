"""The alignment probe: engine tensors reach their pairs, and differences are worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drl.errors import ContractError
from drl.stages.alignment import OUTPUT, differences, with_alignment, with_debug_tensors
from drl.stages.shards import build_shards
from drl.testing import make_pair, make_sample
from drl.types import (
    Group,
    LossOutput,
    Pair,
    PairBatch,
    Predictions,
    Rollout,
    Sample,
    Shard,
)

STEPS = 3


def sample_of(index: int, **debug: Tensor) -> Sample:
    sample = make_sample(index=index, seed=index, steps=STEPS)
    assert sample.trajectory is not None
    outputs = torch.arange(STEPS * 4.0).reshape(STEPS, 4) + 100 * index
    sample.trajectory = replace(sample.trajectory, debug={OUTPUT: outputs, **debug})
    return sample


def rollout_of(*samples: Sample) -> Rollout:
    groups = [Group(group_index=0, prompt=samples[0].prompt, samples=list(samples))]
    return Rollout(rollout_id=0, version=0, groups=groups)


def run_with(engine_debug: bool = True) -> Any:
    return SimpleNamespace(recipe=SimpleNamespace(debug=SimpleNamespace(engine_debug=engine_debug)))


def shards_of(*ids: tuple[int, int], **values: float) -> list[Shard]:
    units = [
        [make_pair(id=pair, unit=pair[0], values={"step": float(pair[1]), **values})]
        for pair in ids
    ]
    return build_shards(units, steps=1, micro_batch_size=2, ranks=1, rollout_id=0)


def pairs_in(shards: Any) -> list[Pair]:
    return [pair for shard in shards for window in shard.windows for b in window for pair in b]


def test_each_pair_gets_the_tensors_of_its_sample_and_step() -> None:
    std = torch.tensor([0.1, 0.2, 0.3])
    rollout = rollout_of(sample_of(0), sample_of(1, noise_std_devs=std))
    found = with_debug_tensors(run_with(), shards_of((1, 2), (0, 0), (1, 1)), rollout)
    first, second, third, filler = pairs_in(found)
    assert first.debug[OUTPUT].tolist() == [108.0, 109.0, 110.0, 111.0]
    assert first.debug["noise_std_devs"].item() == pytest.approx(0.3)
    assert second.debug.keys() == {OUTPUT}
    assert second.debug[OUTPUT].tolist() == [0.0, 1.0, 2.0, 3.0]
    # filler repeats a pair, and so its tensors
    assert (filler.weight, filler.debug[OUTPUT].tolist()) == (0.0, third.debug[OUTPUT].tolist())


def test_nothing_is_touched_without_the_option() -> None:
    shards = shards_of((0, 0))
    assert with_debug_tensors(run_with(False), shards, rollout_of(sample_of(0))) is shards


def test_pairs_without_a_recorded_step_are_refused() -> None:
    shards = build_shards(
        [[make_pair(id=(0, 0), unit=0)]], steps=1, micro_batch_size=1, ranks=1, rollout_id=0
    )
    with pytest.raises(ContractError, match=r"pair \(0, 0\) names no recorded step"):
        with_debug_tensors(run_with(), shards, rollout_of(sample_of(0)))
    with pytest.raises(ContractError, match=r"pair \(7, 0\) names no recorded step"):
        with_debug_tensors(run_with(), shards_of((7, 0)), rollout_of(sample_of(0)))


def test_missing_and_short_tensors_are_named() -> None:
    bare = make_sample(index=0, steps=STEPS)
    with pytest.raises(ContractError, match="sample 0 came without 'model_outputs'"):
        with_debug_tensors(run_with(), shards_of((0, 0)), rollout_of(bare))
    short = sample_of(0, noise_std_devs=torch.zeros(2))
    with pytest.raises(ContractError, match=r"'noise_std_devs' of sample 0 has 2 steps, .* 3"):
        with_debug_tensors(run_with(), shards_of((0, 0)), rollout_of(short))


def batch_of(*outputs: Tensor, weights: list[float]) -> PairBatch:
    pairs = tuple(replace(make_pair(), debug={OUTPUT: output}) for output in outputs)
    return PairBatch(
        pairs=pairs,
        tensors={},
        values={},
        weight_B=torch.tensor(weights),
        sigma_B=torch.zeros(len(pairs)),
        timestep_B=None,
    )


def test_differences_are_those_of_rows_with_weight() -> None:
    engine = torch.tensor([[1.0, -4.0], [2.0, 2.0], [900.0, 0.0]])
    trained = torch.tensor([[1.5, -4.0], [2.0, 1.0], [0.0, 0.0]])
    mean, largest, relative = differences(trained, engine, torch.tensor([1.0, 3.0, 0.0]))
    # rows count once whatever their weight: (0.25 + 0.5) over 2 rows
    assert (mean.total.item(), mean.count.item(), mean.by_component) == (0.75, 2.0, True)
    assert (largest.total.item(), largest.reduction) == (1.0, "max")
    assert (relative.total.item(), relative.reduction) == (0.25, "max")


def test_outputs_of_zeros_and_batches_of_filler_divide_by_something() -> None:
    zero = torch.zeros(2, 3)
    for weights in ([1.0, 1.0], [0.0, 0.0]):
        mean, largest, relative = differences(zero, zero, torch.tensor(weights))
        assert (largest.total.item(), relative.total.item()) == (0.0, 0.0)
        assert mean.total.item() == 0.0
    _, _, relative = differences(zero + 1, zero, torch.ones(2))
    assert relative.total.item() == pytest.approx(1e30)


def test_metrics_join_those_of_the_loss_in_float32() -> None:
    engine = torch.tensor([1.0, 2.0])
    predictions = Predictions(trained={"visual": torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)})
    output = LossOutput(
        loss=torch.tensor(7.0),
        metrics={"loss": differences(*[torch.ones(1, 1)] * 2, torch.ones(1))[0]},
    )
    found = with_alignment(batch_of(engine, weights=[2.0]), predictions, output)
    assert found.loss is output.loss
    assert found.metrics.keys() == {
        "loss",
        "model_output_mean_abs_diff",
        "model_output_max_abs_diff",
        "model_output_rel_max",
    }
    assert found.metrics["model_output_max_abs_diff"].total.item() == 1.0
    assert found.metrics["model_output_rel_max"].total.item() == 0.5
    assert found.metrics["model_output_mean_abs_diff"].total.dtype == torch.float32


def test_a_batch_without_tensors_passes_and_several_streams_do_not() -> None:
    plain = replace(batch_of(torch.zeros(2), weights=[1.0]), pairs=(make_pair(),))
    output = LossOutput(loss=torch.zeros(()), metrics={})
    assert with_alignment(plain, Predictions(trained={}), output) is output
    two = Predictions(trained={"visual": torch.zeros(1, 2), "audio": torch.zeros(1, 2)})
    with pytest.raises(ContractError, match="one stream"):
        with_alignment(batch_of(torch.zeros(2), weights=[1.0]), two, output)
