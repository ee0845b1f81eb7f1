"""Direct preference optimisation on N ranks: what each rank builds, and what it compares with one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranked_trainer import WIDTH, gradients, make_trainer
from small_trainer import FAMILY, Toy

from drl.model.parallel import ALONE, Ranks
from drl.model.trainer import Trainer
from drl.stages.pairs import build_shards
from drl.testing import make_sample
from drl.types import VISUAL, Context, Sample, Shard, StepContext, rejected
from drl_loss_dpo.config import DpoConfig
from drl_loss_dpo.loss import Dpo

FAMILY_WITHOUT_TIMESTEPS: Any = Toy(
    **vars(FAMILY) | {"model_time": lambda sigma_B, timestep_B: 1000 * sigma_B}
)


class SharpDpo(Dpo):
    """Options are fixed, because each rank builds the loss from its class alone."""

    def __init__(self, options: None, context: Context) -> None:
        super().__init__(DpoConfig(beta=30.0), context)


def preferences(count: int) -> list[Sample]:
    """Return encoded preferences; every third one is removed."""
    samples = []
    for index in range(count):
        sample = make_sample(index=index)
        generator = torch.Generator().manual_seed(index)
        sample.clean = {
            name: torch.randn(WIDTH, generator=generator) for name in (VISUAL, rejected(VISUAL))
        }
        sample.removed = index % 3 == 2
        samples.append(sample)
    return samples


def make_dpo_trainer(ranks: Ranks = ALONE) -> Trainer:
    """Build a rank's trainer of adapters that already do something; the base is their reference."""
    trainer = make_trainer(ranks, lora=True, reference=True)
    loss = SharpDpo(None, trainer.context)
    trainer.forward = replace(trainer.forward, loss=loss, family=FAMILY_WITHOUT_TIMESTEPS)
    return trainer


def shards_for(count: int, world: int) -> list[Shard]:
    """Return the shards of so many preferences for each rank of a world."""
    loss = SharpDpo(None, StepContext())
    units = [loss.expand([sample], None, StepContext()) for sample in preferences(count)]
    return build_shards(units, steps=1, micro_batch_size=2, ranks=world, rollout_id=0)


def compare_with_one_rank(counts: Sequence[int], ranks: Ranks) -> Trainer:
    """Find gradients and figures together and alone, and raise where they differ."""
    for count in counts:
        alone, together = make_dpo_trainer(), make_dpo_trainer(ranks)
        (expected,) = alone.train(shards_for(count, 1))
        (report,) = together.train(shards_for(count, ranks.world))
        right = gradients(alone)
        assert max(gradient.abs().max().item() for gradient in right.values()) > 0
        for name, gradient in gradients(together).items():
            torch.testing.assert_close(gradient, right[name], rtol=1e-4, atol=1e-6)
        assert report.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    return together
