"""What is trained on: groups kept or dropped, samples taken out, and groups that leave a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy
import torch

from drl.errors import ContractError
from drl.types import Dropped, Group, Rollout

if TYPE_CHECKING:
    from drl.run import Run

UNNAMED = "filtered"
"""Reason of a group that ``rollout.dynamic_sampling_filter`` dropped without giving one."""


def verdict(run: Run, group: Group) -> Dropped | None:
    """Ask every plugin, and then the recipe's own filter, whether a group is dropped."""
    answers = run.hooks.drl_filter_group(run=run, group=group)
    first: Dropped | None = next((answer for answer in answers if answer), None)
    function = run.functions.get("rollout.dynamic_sampling_filter")
    if first is not None or function is None:
        return first
    return dropped_by(function(run, group))


def dropped_by(answer: object) -> Dropped | None:
    """Read a filter's answer; ContractError for one that says neither keep nor drop."""
    if isinstance(answer, Dropped):
        return answer
    reason: object = UNNAMED
    keep = answer
    if isinstance(answer, tuple) and len(answer) == 2:
        keep, reason = answer
    if isinstance(keep, (torch.Tensor, numpy.bool_)):  # as ``rewards.std() > 0`` gives it
        keep = bool(keep)
    if not isinstance(keep, bool) or not (keep or (isinstance(reason, str) and reason)):
        raise ContractError(
            "rollout.dynamic_sampling_filter must return True, False, Dropped(reason) or "
            f"(keep, reason), got {answer!r}"
        )
    return None if keep else Dropped(str(reason))


def filter_samples(run: Run, rollout: Rollout) -> None:
    """Let ``rollout.sample_filter`` mark samples of the kept groups; they still count for advantages."""
    function = run.functions.get("rollout.sample_filter")
    if function is None:
        return
    answer = function(run, rollout.groups)
    if answer is not None:
        raise ContractError(
            "rollout.sample_filter works in place (sample.remove_sample = True) and returns None, got "
            f"a {type(answer).__name__}, which would go unread"
        )


def use_buffer_filter(run: Run) -> None:
    """Hand ``rollout.buffer_filter`` to the data source, whose buffer it chooses from."""
    function = run.functions.get("rollout.buffer_filter")
    if function is None:
        return

    def choose(buffer: list[Group], count: int) -> list[Group]:
        chosen: list[Group] = function(run, run.current, buffer, count)
        return chosen

    run.source.use_buffer_filter(choose)
