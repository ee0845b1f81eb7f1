"""Functions of a rollout: filter ``zero_std``, buffer order ``pop_first``, drl's own rollout ``own``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from drl.builtin import prompt_buffer
from drl.builtin.advantage_groups import is_informative
from drl.mathematics.statistics import group_statistics
from drl.types import Dropped, Group, Rollout, Sample

if TYPE_CHECKING:
    from drl.interfaces.data import DataSource
    from drl.run import Run

ROUNDING = 1e-6
"""A std up to this share of the largest reward is rounding noise, as advantage estimators take it."""


def zero_std(run: Run, group: Group) -> Dropped | bool:
    """Keep a group whose rewards differ: the unbiased std of those that there are is above 0.

    The reason names the reward, ``zero_std_0.5``, so that the log tells prompts that are too hard from
    those that are too easy; a group with fewer than two rewards has the reason ``too_few_rewards``.
    """
    rewards = [sample.reward for sample in group.samples]
    known = [reward for reward in rewards if reward is not None and math.isfinite(reward)]
    if len(known) < 2:
        return Dropped("too_few_rewards")
    values = torch.tensor(known, dtype=torch.float64)
    one_group = torch.zeros(len(known), dtype=torch.int64)
    statistics = group_statistics(values, one_group, torch.ones(len(known), dtype=torch.bool))
    if bool(is_informative(statistics, ROUNDING)[0]):
        return True
    # + 0.0: a mean of -0.04 must not make a second reason "-0.0"
    return Dropped(f"zero_std_{round(float(statistics.means_Q[0]), 1) + 0.0}")


def pop_first(run: Run, rollout_id: int | None, buffer: list[Group], count: int) -> list[Group]:
    """Take the oldest groups out of the buffer."""
    return prompt_buffer.pop_first(buffer, count)


def own(
    run: Run, rollout_id: int, data_source: DataSource, *, evaluation: bool = False
) -> Rollout | Mapping[str, Sequence[Sample]]:
    """Make drl's own rollout of prompts of ``data_source``, or its own evaluation."""
    from drl.stages.collect import own_rollout
    from drl.stages.evaluate import own_evaluation

    return own_evaluation(run) if evaluation else own_rollout(run, rollout_id, data_source)
