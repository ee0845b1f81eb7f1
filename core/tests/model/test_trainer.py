"""The trainer on a model of a few numbers: gradients, skipped steps, schedule, state."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from small_trainer import Scale, broken, parameters, shard, trainer
from torch import nn

from drl.errors import BatchError, CheckpointError, NonFiniteError
from drl.mathematics.schedule import ScheduleSettings
from drl.stages.loss import make_batch, predict_as
from drl.testing import make_pair
from drl.types import Condition, Conditions, StepContext


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 5, 16])
def test_the_micro_batch_size_does_not_change_the_gradient(micro):
    reference, other = trainer(), trainer()
    list(reference.train(shard(7, micro=7)))
    list(other.train(shard(7, micro=micro)))
    grads = [[p.grad.item() for _, p in t.named_parameters()] for t in (reference, other)]
    assert grads[0] == pytest.approx(grads[1], rel=1e-5)


def test_the_gradient_is_that_of_the_weighted_mean():
    made = trainer()
    (report,) = made.train(shard(3, micro=2))
    x = torch.stack([make_pair(seed=n).tensors["visual"] for n in range(3)])
    y = torch.stack([make_pair(seed=n).tensors["visual.next"] for n in range(3)])
    weights = torch.tensor([1.0, 2.0, 1.0])
    model = Scale()
    loss_B = (model(x) - y).flatten(1).square().mean(1)
    loss = (weights * loss_B).sum() / weights.sum()
    loss.backward()
    got = dict(made.named_parameters())["transformer.weight"].grad
    assert got.item() == pytest.approx(model.weight.grad.item(), rel=1e-5)
    assert report.metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_a_non_finite_loss_leaves_weights_alone_and_is_named():
    made = trainer()
    before = parameters(made)
    (report,) = made.train(shard(change=broken))
    assert report.skipped == "non-finite loss in micro-batch 1 (pairs [(2, 0), (3, 0)])"
    assert all(torch.equal(before[name], value) for name, value in parameters(made).items())
    assert made.bad_steps == 1


def test_a_non_finite_gradient_is_named():
    made = trainer()
    dict(made.named_parameters())["transformer.bias"].register_hook(lambda g: g * float("inf"))
    before = parameters(made)
    (report,) = made.train(shard())
    assert report.skipped == "non-finite gradient in transformer.bias"
    assert all(torch.equal(before[name], value) for name, value in parameters(made).items())


def test_too_many_bad_steps_in_a_row_stop_the_run():
    made = trainer(max_bad_steps=1)
    list(made.train(shard(change=broken)))
    with pytest.raises(NonFiniteError, match=r"trust\.max_bad_steps = 1"):
        list(made.train(shard(change=broken)))


def test_a_good_step_forgives_the_bad_ones_before():
    made = trainer(max_bad_steps=1)
    for change in (broken, None, broken, None):
        list(made.train(shard(change=change)))
    assert made.bad_steps == 0


def test_a_window_of_weight_0_is_skipped_and_said():
    made = trainer()
    before = parameters(made)
    (report,) = made.train(shard(change=lambda pair: replace(pair, weight=0.0)))
    assert report.skipped == "every row of the window has weight 0"
    assert all(torch.equal(before[name], value) for name, value in parameters(made).items())


def test_a_gradient_of_exactly_0_moves_nothing_whatever_the_momentum():
    made = trainer()
    list(made.train(shard()))
    for _, parameter in made.named_parameters():
        parameter.register_hook(torch.zeros_like)
    before = parameters(made)
    (report,) = made.train(shard())
    assert report.skipped == "the gradient is exactly 0: no group is informative"
    assert all(torch.equal(before[name], value) for name, value in parameters(made).items())
    assert made.bad_steps == 0


def test_warm_up_starts_at_its_first_rate():
    schedule = ScheduleSettings(lr=0.1, decay_iters=10, warmup=2, warmup_init=0.0)
    made = trainer(schedule=schedule)
    rates = [report.metrics["train/lr"] for report in made.train(shard(steps=3, micro=1))]
    assert rates == pytest.approx([0.0, 0.05, 0.1])


def test_one_report_per_step_counts_global_steps():
    made = trainer()
    reports = [*made.train(shard(steps=3)), *made.train(shard(steps=2))]
    assert [r.global_step for r in reports] == [0, 1, 2, 3, 4]
    assert [r.window for r in reports] == [0, 1, 2, 0, 1]


def test_clipping_bounds_the_update():
    free, clipped = trainer(), trainer(clip=1e-3)
    for made in (free, clipped):
        made.optimizer = torch.optim.SGD(made.models["transformer"].parameters(), lr=1.0)
        list(made.train(shard()))
    moved = torch.tensor(
        [
            (value - 0.5 if "weight" in name else value - 0.1)
            for name, value in parameters(clipped).items()
        ]
    )
    assert moved.norm().item() == pytest.approx(1e-4, rel=1e-3)  # lr 0.1


def test_state_survives_save_and_restore_bit_for_bit(tmp_path):
    made, other = trainer(), trainer()
    list(made.train(shard(steps=3)))
    made.save(tmp_path)
    assert other.restore(tmp_path) == 1
    for one in (made, other):
        list(one.train(shard(steps=2)))
    left, right = parameters(made), parameters(other)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert made.global_step == other.global_step == 5


def test_a_state_of_another_model_is_refused_before_anything_changes(tmp_path):
    made = trainer()
    list(made.train(shard()))
    made.save(tmp_path)

    class Other(Scale):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.extra = nn.Parameter(torch.zeros(1))

    other = trainer(Other())
    before = parameters(other)
    with pytest.raises(
        CheckpointError, match=r"1 missing \['transformer.extra'\].*1 of another shape"
    ):
        other.restore(tmp_path)
    assert all(torch.equal(before[name], value) for name, value in parameters(other).items())


def test_a_truncated_state_is_named(tmp_path):
    made = trainer()
    list(made.train(shard()))
    made.save(tmp_path)
    file = tmp_path / "model" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is cut short"):
        trainer().restore(tmp_path)


def test_a_micro_batch_never_mixes_components():
    pairs = [make_pair(), replace(make_pair(id=(1, 0)), component="transformer_2")]
    with pytest.raises(BatchError, match="mixes denoising phases"):
        make_batch(pairs, torch.device("cpu"))


def test_the_reference_runs_without_dropout_and_leaves_training_mode_on():
    made = trainer(Scale(dropout=0.5))
    forward = replace(made.forward, reference=lambda component: nullcontext())
    pairs = [make_pair(id=(n, 0), seed=n) for n in range(2)]
    batch = make_batch(pairs, forward.device)
    inputs = replace(
        forward.loss.prepare(batch, StepContext()),
        conditions=Conditions(positive=Condition(arguments={})),
        model_time_B=batch.timestep_B,
    )
    forward.models["transformer"].train()
    first, second = (
        predict_as(forward.reference, forward, batch, inputs)["visual"] for _ in range(2)
    )
    assert predict_as(forward.old, forward, batch, inputs) is None
    assert torch.equal(first, second)
    assert forward.models["transformer"].training
