"""The policy loss on a model of two numbers: rollouts of any size, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from small_trainer import FAMILY, Scale
from torch import Tensor

from drl.api import Context, Pair, Sample, Shard, StepContext
from drl.mathematics.schedule import ScheduleSettings
from drl.model.trainer import StepSettings, Trainer
from drl.stages.loss import Forward
from drl.stages.pairs import expand_units, unit_spans
from drl.stages.shards import Layout, shards_of, split_evenly
from drl.stages.step import WindowResult, accumulate, result_of
from drl.testing import make_sample
from drl.types import Guidance
from drl_loss_flow_grpo.config import PolicyLossConfig
from drl_loss_flow_grpo.loss import PolicyLoss
from drl_sde_flow.flow import FlowSde

SECTION = SimpleNamespace(
    kl_beta=0.0, adv_clip_max=5.0, noise_level=0.7, log_prob_no_const=False, ref_mode="none"
)
CONTEXT = StepContext(section=SECTION)
LATENT = (2, 1, 2, 2)
STEPS = 2


def make_forward(*, recompute: bool = False) -> Forward:
    """Return what a forward of the model needs; the clip is wide, so that most rows have a gradient."""
    options = PolicyLossConfig(clip_range=0.9, recompute_old_log_prob=recompute)
    return Forward(
        family=FAMILY,
        models={"transformer": Scale()},
        loss=PolicyLoss(options, CONTEXT),
        backend=FlowSde(None, Context(section=SECTION)),
        device=torch.device("cpu"),
        dtype="fp32",
        guidance={"guidance_scale": Guidance()},
    )


def make_trainer(forward: Forward, lr: float = 0.05) -> Trainer:
    """Return a trainer that takes plain gradient steps."""
    parameters = list(forward.models["transformer"].parameters())
    return Trainer(
        forward=forward,
        optimizer=torch.optim.SGD(parameters, lr=lr),
        settings=StepSettings(
            schedule=ScheduleSettings(lr=lr, decay_iters=10),
            clip_grad=1e9,
            max_bad_steps=1,
            buffer_bytes=2**20,
        ),
        context=CONTEXT,
        updater=None,
    )


def make_samples(prompts: int, count: int) -> list[Sample]:
    """Return scored samples of which a filter took some out, and of which a reward failed on some."""
    samples = []
    for index in range(prompts * count):
        sample = make_sample(
            index=index, group_index=index // count, seed=index, steps=STEPS, latent=LATENT
        )
        sample.reward = None if index % 5 == 3 else math.sin(index)
        sample.removed = index % 7 == 2
        samples.append(sample)
    return samples


def counts(sample: Sample) -> bool:
    """True when a sample is trained on."""
    return not sample.removed and sample.reward is not None


def windows_of(forward: Forward, samples: Sequence[Sample], steps: int) -> list[list[list[Pair]]]:
    """Return the units of each window, as core makes them."""
    advantages = [0.4 + math.cos(sample.index) for sample in samples]
    return [
        expand_units(forward.loss, samples, spans, advantages, replace(CONTEXT, window=number))
        for number, spans in enumerate(split_evenly(unit_spans("sample", samples), steps))
    ]


def one_big_batch(forward: Forward, window: Sequence[Sequence[Pair]]) -> Tensor:
    """Return the gradient ``(2,)`` of one micro-batch of all pairs that count, and of nothing else."""
    pairs = tuple(pair for unit in window for pair in unit if pair.weight)
    zero_gradients(forward)
    if pairs:
        accumulate(forward, [pairs], len(pairs), CONTEXT)
    return gradient_of(forward)


def over_ranks(
    forward: Forward, windows: Sequence[Sequence[Sequence[Pair]]], layout: Layout
) -> tuple[list[Tensor], list[Shard], list[WindowResult]]:
    """Return the gradient of each window, summed over the ranks, with the shards and all results."""
    shards = shards_of(windows, layout, rollout_id=0)
    gradients, results = [], []
    for number, weight in enumerate(shards[0].window_weights):
        zero_gradients(forward)
        if weight:
            results += [
                result_of(
                    shard.windows[number],
                    accumulate(forward, shard.windows[number], weight, CONTEXT),
                )
                for shard in shards
            ]
        gradients.append(gradient_of(forward))
    return gradients, shards, results


def zero_gradients(forward: Forward) -> None:
    for parameter in forward.models["transformer"].parameters():
        parameter.grad = None


def gradient_of(forward: Forward) -> Tensor:
    """Return the gradient of the two numbers; 0 where there is none."""
    parameters = list(forward.models["transformer"].parameters())
    return torch.stack([torch.zeros(()) if p.grad is None else p.grad for p in parameters])
