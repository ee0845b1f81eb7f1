"""Old log-probabilities from the trainer instead of the engine, for losses that ask for it.

They are those of the weights that a rollout's training starts from. The first window's own forward has
these weights, so its old log-prob is its new one without gradient, and the ratio is exactly 1; the later
windows are scored before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from drl.errors import ContractError
from drl.stages.loss import ENGINE, OLD, Forward, score_pairs, value_of
from drl.types import Pair, Shard, StepContext


@torch.no_grad()
def recomputed(forward: Forward, shard: Shard, context: StepContext) -> Shard:
    """Return the shard with the old log-probs of every window but the first under the present weights.

    Windows of weight 0 are not trained on and stay as they are. Collective over the ranks.
    """
    windows = [shard.windows[0]] if shard.windows else []
    for number, window in enumerate(shard.windows[1:], start=1):
        if shard.window_weights[number] == 0:
            windows.append(window)
            continue
        here = replace(context, rollout_id=shard.rollout_id, window=number)
        windows.append([_rescored(forward, pairs, here) for pairs in window])
    return replace(shard, windows=windows)


def _rescored(forward: Forward, pairs: Sequence[Pair], context: StepContext) -> tuple[Pair, ...]:
    transition = score_pairs(forward, pairs, context)
    if transition is None:
        raise ContractError("only losses that need a transition have log-probs to recompute")
    values = transition.joint_log_prob.tolist()
    return tuple(
        replace(pair, values={**pair.values, OLD: value, ENGINE: value_of(pair, OLD)})
        for pair, value in zip(pairs, values, strict=True)
    )
