"""Scores to rewards: the weighted sum of the terms, and what a failed score means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from drl.errors import RewardError
from drl.types import Sample, Score


def assign_rewards(
    samples: Sequence[Sample],
    scores: Sequence[Mapping[str, Score]],
    weights: Mapping[str, float],
    *,
    on_failure: str,
) -> None:
    """Set ``scores`` and ``reward`` of each sample; a failed term leaves the reward None.

    Raises RewardError at the first failure when ``on_failure`` is "error".
    """
    for sample, terms in zip(samples, scores, strict=True):
        sample.scores = terms
        sample.reward = weighted_sum(terms, weights)
        if sample.reward is None and on_failure == "error":
            raise RewardError(_failure_text(sample, terms, weights))


def weighted_sum(terms: Mapping[str, Score], weights: Mapping[str, float]) -> float | None:
    """Return the sum of weight times value; None when a term that counts has no value."""
    total = 0.0
    for name, weight in weights.items():
        if weight == 0.0:
            continue
        value = terms[name].value
        if value is None or not math.isfinite(value):
            return None
        total += weight * value
    return total


def _failure_text(sample: Sample, terms: Mapping[str, Score], weights: Mapping[str, float]) -> str:
    failed = {
        name: terms[name].failure or f"value {terms[name].value}"
        for name, weight in weights.items()
        if weight != 0.0 and weighted_sum(terms, {name: weight}) is None
    }
    return (
        f"sample {sample.index} (prompt row {sample.prompt.row}) got no reward: {failed}\n"
        'set reward.on_failure = "mask" to train on without such samples'
    )


def require_some(samples: Sequence[Sample], rollout_id: int) -> None:
    """Raise RewardError when no sample of a rollout has a reward: nothing could be learned."""
    if samples and all(sample.reward is None for sample in samples):
        first = samples[0]
        raise RewardError(
            f"rollout {rollout_id}: none of its {len(samples)} samples got a reward; first failure: "
            f"{ {name: score.failure for name, score in first.scores.items()} }"
        )
