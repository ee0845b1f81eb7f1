"""Old log-probabilities from the trainer instead of the engine, for losses that ask for it.

They are those of the weights that a rollout's training starts from. The first window's own forward has
these weights, so its old log-prob is its new one without gradient, and the ratio is exactly 1; the later
windows are scored before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from drl.stages.loss import ENGINE, OLD, Forward, value_of
from drl.stages.parity import log_probs
from drl.types import Pair, Shard, StepContext


def recomputed(forward: Forward, shard: Shard, context: StepContext) -> Shard:
    """Return the shard with the old log-probs of every window but the first under the present weights.

    Windows of weight 0 are not trained on and stay as they are. Collective over the ranks.
    """
    scored = [n for n in range(1, len(shard.windows)) if shard.window_weights[n] != 0]
    batches = [
        (pairs, replace(context, rollout_id=shard.rollout_id, window=number))
        for number in scored
        for pairs in shard.windows[number]
    ]
    values = iter(log_probs(forward, batches).tolist())
    windows = [
        [_rescored(pairs, values) for pairs in window] if number in scored else window
        for number, window in enumerate(shard.windows)
    ]
    return replace(shard, windows=windows)


def _rescored(pairs: Sequence[Pair], values: Iterator[float]) -> tuple[Pair, ...]:
    return tuple(
        replace(pair, values={**pair.values, OLD: next(values), ENGINE: value_of(pair, OLD)})
        for pair in pairs
    )
