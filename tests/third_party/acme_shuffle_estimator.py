"""What learns nothing must not look as if it learned: rewards without their samples."""

from __future__ import annotations

from dataclasses import replace

import torch

from drl.builtin.advantage_grpo import Grpo


class Shuffled(Grpo):
    """The same advantages, permuted over the rollout by a generator of the run's seed."""

    rollout = 0

    def advantages(self, rewards):
        right = super().advantages(rewards)
        generator = self.context.generator("acme_shuffle", self.rollout)
        self.rollout += 1
        order = torch.randperm(len(right.values), generator=generator)
        return replace(right, values=right.values[order])
