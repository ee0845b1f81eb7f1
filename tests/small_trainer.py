"""A trainer on a model of two numbers: steps, gradients and states that can be followed by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import nn

from drl.interfaces.family import Family, Route
from drl.interfaces.loss import Loss
from drl.mathematics.schedule import ScheduleSettings
from drl.model.trainer import StepSettings, Trainer
from drl.stages.loss import Forward
from drl.stages.pairs import build_shards
from drl.testing import make_pair
from drl.types import (
    Condition,
    ForwardInputs,
    Guidance,
    LossOutput,
    Metric,
    StepContext,
)


class Regression(Loss):
    """Squared distance of the prediction to the recorded next latents."""

    def expand(self, unit, advantages, context):
        raise NotImplementedError

    def prepare(self, pairs, context):
        return ForwardInputs(streams={"visual": pairs.tensors["visual"]})

    def compute(self, pairs, inputs, predictions, transition):
        error = predictions.trained["visual"] - pairs.tensors["visual.next"]
        loss_B = error.flatten(1).square().mean(1)
        total = (pairs.weight_B * loss_B).sum()
        metric = Metric(total=total.detach(), count=pairs.weight_B.sum())
        return LossOutput(loss=total, metrics={"loss": metric})


class Scale(nn.Module):
    """velocity = weight * x + bias, with dropout that is off at evaluation."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.tensor(0.1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.weight * x + self.bias)


class Toy(SimpleNamespace):
    """A family by its functions; guidance is as in all families."""

    conditions = Family.conditions
    predict = Family.predict


FAMILY = Toy(
    condition=lambda record: Condition(arguments={}),
    collate=lambda rows: Condition(arguments={}, rows=len(rows)),
    route=lambda timestep: Route(),
    model_time=lambda sigma_B, timestep_B: timestep_B,
    forward=lambda model, streams, time_B, condition: {"visual": model(streams["visual"])},
)


def trainer(model=None, *, lr=0.1, max_bad_steps=1, schedule=None, clip=1e9):
    model = model or Scale()
    context = StepContext()
    forward = Forward(
        family=FAMILY,
        models={"transformer": model},
        loss=Regression(None, context),
        backend=None,
        device=torch.device("cpu"),
        dtype="fp32",
        guidance={"guidance_scale": Guidance()},
    )
    return Trainer(
        forward=forward,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0),
        settings=StepSettings(
            schedule=schedule or ScheduleSettings(lr=lr, decay_iters=10),
            clip_grad=clip,
            max_bad_steps=max_bad_steps,
            buffer_bytes=2**20,
        ),
        context=context,
        updater=None,
    )


def shard(count=6, *, micro=2, steps=1, change=None):
    units = [[make_pair(id=(n, 0), unit=n, seed=n, weight=1.0 + n % 2)] for n in range(count)]
    if change:
        units = [[change(pair) for pair in unit] for unit in units]
    return build_shards(units, steps=steps, micro_batch_size=micro, ranks=1, rollout_id=0)


def broken(pair):
    if pair.unit != 3:
        return pair
    nan = torch.full_like(pair.tensors["visual.next"], float("nan"))
    return replace(pair, tensors={**pair.tensors, "visual.next": nan})


def parameters(made):
    return {name: p.detach().clone() for name, p in made.named_parameters()}
