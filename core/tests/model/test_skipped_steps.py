"""Steps that are only measured, and the trainer of a run that trains nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_trainer import Scale, broken, parameters, shard, trainer

from drl.errors import ContractError
from drl.model.ema import Ema, EmaSettings
from drl.model.idle import Idle
from drl.stages.step import measure, result_of

WHY = "debug.skip_optimizer_step"


def measuring(model=None, **options):
    made = trainer(model, **options)
    made.settings = replace(made.settings, skip=WHY)
    return made


def test_figures_are_those_of_a_real_step_and_nothing_moves():
    skipping, real = measuring(), trainer()
    before = parameters(skipping)
    reports = list(skipping.train(shard(steps=2)))
    right = list(real.train(shard(steps=2)))
    assert [report.skipped for report in reports] == [WHY] * 2
    assert [report.global_step for report in reports] == [0, 1]
    assert reports[0].metrics["train/loss"] == right[0].metrics["train/loss"]
    assert reports[0].metrics["train/lr"] == right[0].metrics["train/lr"]
    # the real second step starts from other weights
    assert reports[1].metrics["train/loss"] != right[1].metrics["train/loss"]
    assert "train/grad_norm" not in reports[0].metrics
    assert all(torch.equal(before[name], value) for name, value in parameters(skipping).items())
    assert (skipping.global_step, skipping.next_rollout) == (2, 1)
    assert skipping.optimizer.state == {}


def test_gradients_that_were_there_are_cleared_and_none_is_made():
    made = measuring()
    for _, parameter in made.named_parameters():
        parameter.grad = torch.ones_like(parameter)
    list(made.train(shard()))
    assert all(parameter.grad is None for _, parameter in made.named_parameters())


def test_a_loss_that_is_not_finite_is_named_and_counted():
    made = measuring(max_bad_steps=5)
    (report,) = made.train(shard(change=broken))
    assert report.skipped is not None
    assert report.skipped.startswith("non-finite loss in micro-batch 1")
    assert made.bad_steps == 1
    list(made.train(shard()))
    assert made.bad_steps == 0


def test_a_window_of_weight_0_has_no_figures():
    made = measuring()
    (report,) = made.train(shard(change=lambda pair: replace(pair, weight=0.0)))
    assert report.skipped == "every row of the window has weight 0"
    assert report.metrics.keys() == {"train/lr"}


def test_the_average_of_weights_that_stand_still_stands_still():
    made = measuring()
    made.ema = Ema(dict(made.named_parameters()), EmaSettings(decay_flat_steps=9, decay_init=0.5))
    list(made.train(shard()))
    assert made.ema.count == 0


def test_a_model_in_training_keeps_its_dropout():
    """The forward that is measured is that of training: two passes differ."""
    made = measuring(Scale(dropout=0.5))
    first, second = (next(iter(made.train(shard()))).metrics["train/loss"] for _ in range(2))
    assert first != second


def test_measuring_accumulates_what_a_step_would():
    made = trainer()
    window = shard()[0].windows[0]
    found = result_of(window, measure(made.forward, window, made.context))
    assert found.broken is None
    (report,) = made.train(shard())
    assert found.figures.reduced("train/")["train/loss"] == report.metrics["train/loss"]


class Weights:
    """Notes what it is asked for."""

    def __init__(self):
        self.asked = []
        self.remarks = ("older",)

    def use_updater(self, name):
        self.asked.append(name)

    def push(self, version, engines):
        return [version]

    def restore(self, path, options):
        self.asked.append(path)
        return 7

    def sleep(self, *, frozen=True):
        self.asked.append("sleep")

    def wake(self):
        self.asked.append("wake")

    def close(self):
        self.asked.append("close")


def test_an_idle_trainer_brings_start_weights_to_engines_and_writes_none():
    weights = Weights()
    idle = Idle(weights)
    idle.use_updater("in_process_lora")
    assert idle.push(3, []) == [3]
    assert idle.restore(Path("c"), SimpleNamespace()) == idle.next_rollout == 7
    assert idle.remarks == ("older",)
    for call in (idle.sleep, idle.wake, idle.close):
        call()
    assert weights.asked == ["in_process_lora", Path("c"), "sleep", "wake", "close"]
    assert (idle.adapters(), idle.write_weights(Path())) == ({}, [])


def test_an_idle_trainer_without_weights_pushes_nothing():
    idle = Idle()
    for call in (idle.sleep, idle.wake, idle.close, lambda: idle.use_updater("any")):
        call()
    assert list(idle.push(1, [])) == []
    with pytest.raises(ContractError, match="no weights were built to hold it"):
        idle.restore(Path("c"), SimpleNamespace())


@pytest.mark.parametrize("call", ["train", "replay", "save", "begin_save"])
def test_an_idle_trainer_refuses_to_train(call):
    with pytest.raises(ContractError, match="without training was asked to"):
        Idle.__dict__[call](Idle(), [])
