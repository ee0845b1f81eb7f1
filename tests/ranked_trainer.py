"""A trainer of two small blocks on N ranks; what processes of other ranks build is importable from here."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from small_trainer import FAMILY, Regression
from torch import nn

from drl.cluster.ranks import RankedTrainer, RankGroup
from drl.errors import BadInput
from drl.lora import LoraConfig, adapter_off, inject
from drl.lora.sharding import full_tensor
from drl.mathematics.schedule import ScheduleSettings
from drl.model.materialize import ShardSettings, spread
from drl.model.parallel import ALONE, Ranks, RankSettings
from drl.model.trainer import StepSettings, Trainer
from drl.stages.loss import Forward
from drl.stages.pairs import build_shards
from drl.testing import make_pair
from drl.types import Guidance, Shard, StepContext

WIDTH = 6
LORA = LoraConfig(rank=2, alpha=4, target_modules=("first", "second"))


class Block(nn.Module):
    """Two layers with sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)
        self.second = nn.Linear(5, WIDTH)

    def forward(self, x):
        return x + self.second(torch.tanh(self.first(x)))


class Net(nn.Module):
    """Blocks between two layers of the root, and a table that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("table", torch.full((WIDTH,), 0.25), persistent=False)

    def forward(self, x):
        x = self.inlet(x) + self.table
        for block in self.blocks:
            x = block(x)
        return x


def make_net(*, meta: bool = False, lora: bool = False) -> Net:
    """Return the net with the same weights everywhere; with adapters that already do something."""
    if meta:
        with torch.device("meta"):
            net = Net()
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = Net()
    if lora:
        inject(net, LORA, generator=torch.Generator().manual_seed(1))
        if not meta:
            for name, parameter in net.named_parameters():
                if "lora_B" in name:
                    with torch.no_grad():
                        parameter.fill_(0.1)
    return net


def make_trainer(
    ranks: Ranks = ALONE,
    *,
    lora: bool = False,
    load: str = "broadcast",
    shard_frozen: str = "auto",
    clip: float = 1e9,
    loss: type[Regression] = Regression,
    reference: bool = False,
    max_bad_steps: int = 3,
) -> Trainer:
    """Build a rank's trainer, its net spread over the ranks."""
    settings = ShardSettings(
        forward_dtype="fp32", reduce_dtype="fp32", load=load, shard_frozen=shard_frozen
    )
    on_gpu = ranks.mesh is not None and ranks.mesh.device_type == "cuda"
    device = f"cuda:{ranks.rank}" if on_gpu else "cpu"
    net = make_net(meta=not settings.reads(ranks), lora=lora)
    if ranks.world > 1:
        spread("net", net, wrap=("Block",), ranks=ranks, settings=settings, device=device)
    context = StepContext(rank=ranks.rank, world=ranks.world)
    forward = Forward(
        family=FAMILY,
        models={"transformer": net},
        loss=loss(None, context),
        backend=None,
        device=torch.device(device),
        dtype="fp32",
        guidance={"guidance_scale": Guidance()},
        reference=(lambda component: adapter_off(net)) if reference else None,
    )
    return Trainer(
        forward=forward,
        optimizer=torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01),
        settings=StepSettings(
            schedule=ScheduleSettings(lr=0.01, decay_iters=10),
            clip_grad=clip,
            max_bad_steps=max_bad_steps,
            buffer_bytes=2**20,
        ),
        context=context,
        updater=None,
        ranks=ranks,
    )


def make_shards(
    count: int,
    ranks: int,
    *,
    micro: int = 2,
    steps: int = 1,
    change: Callable[[Any], Any] | None = None,
) -> list[Shard]:
    """Return the shards of ``count`` samples with weights 1 and 2 in turn."""
    units = [
        [make_pair(id=(n, 0), unit=n, seed=n, latent=(WIDTH,), weight=1.0 + n % 2)]
        for n in range(count)
    ]
    if change is not None:
        units = [[change(pair) for pair in unit] for unit in units]
    return build_shards(units, steps=steps, micro_batch_size=micro, ranks=ranks, rollout_id=0)


def with_nan(pair: Any) -> Any:
    """Break the last sample of six: it is the last rank's."""
    if pair.unit != 5:
        return pair
    nan = torch.full_like(pair.tensors["visual.next"], float("nan"))
    return replace(pair, tensors={**pair.tensors, "visual.next": nan})


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return whole gradients by name; collective."""
    return {
        name: full_tensor(p.grad).clone()
        for name, p in trainer.named_parameters()
        if p.grad is not None
    }


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return whole trained weights by name; collective."""
    return {name: full_tensor(p).clone() for name, p in trainer.named_parameters()}


def start(
    build: Callable[[Ranks], Trainer], world: int = 2, *, device: str = "cpu", **settings: Any
) -> RankedTrainer:
    """Start ranks whose processes run ``build``."""
    group = RankGroup(RankSettings(world=world, device=device, **settings))
    return RankedTrainer(group.start(build, build), group)


def full_weights(ranks: Ranks) -> Trainer:
    """Build for full training."""
    return make_trainer(ranks)


class Dying(Regression):
    """Kills the process of rank 1 in its second optimizer step."""

    def prepare(self, pairs, context):
        if context.rank == 1 and context.window == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prepare(pairs, context)


class Raising(Regression):
    """Fails on rank 1 in its second optimizer step."""

    def prepare(self, pairs, context):
        if context.rank == 1 and context.window == 1:
            raise ValueError("a bug of rank 1")
        return super().prepare(pairs, context)


class Stuck(Regression):
    """Rank 1 never comes to its second optimizer step."""

    def prepare(self, pairs, context):
        if context.rank == 1 and context.window == 1:
            time.sleep(600)
        return super().prepare(pairs, context)


def dying(ranks: Ranks) -> Trainer:
    """Build for a death."""
    return make_trainer(ranks, loss=Dying)


def raising(ranks: Ranks) -> Trainer:
    """Build for a bug."""
    return make_trainer(ranks, loss=Raising)


def stuck(ranks: Ranks) -> Trainer:
    """Build for a rank that hangs."""
    return make_trainer(ranks, loss=Stuck)


def refusing(ranks: Ranks) -> Trainer:
    """Refuse to build on rank 1."""
    if ranks.rank == 1:
        raise BadInput("rank 1 does not like this recipe")
    return make_trainer(ranks)
