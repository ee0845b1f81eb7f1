"""Scores to rewards: the weighted sum of the terms, and what a failed score means."""

from __future__ import annotations

import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from drl.errors import BadInput, ContractError, RewardError
from drl.types import Sample, Score

if TYPE_CHECKING:
    from drl.run import Run

CUSTOM = "custom"
"""Name under which the scores of ``reward.custom`` stand."""

WeightsOf = Callable[[Sample], Mapping[str, float]]


def scores_groups(run: Run) -> bool:
    """True when the samples of a prompt are scored together: the recipe or a reward asks for it."""
    return bool(run.recipe.reward.group) or run.rewards.wants_groups


async def scores_of(run: Run, samples: Sequence[Sample]) -> Sequence[Mapping[str, Score]]:
    """Return the scores by term, per sample: of the recipe's rewards, or of ``reward.custom``."""
    function = run.functions.get("reward.custom")
    if function is None:
        return await run.rewards.score(samples)
    return await custom_scores(function, run, samples)


async def custom_scores(
    function: Callable[..., Awaitable[Sequence[float]]], run: Run, samples: Sequence[Sample]
) -> list[dict[str, Score]]:
    """Ask the recipe's function; ContractError unless it returns one number per sample."""
    values = await function(run, samples)
    try:
        found = list(values)
    except TypeError as error:
        raise ContractError(
            f"reward.custom must return one number per sample, got a {type(values).__name__}"
        ) from error
    if len(found) != len(samples):
        raise ContractError(
            f"reward.custom returned {len(found)} scores for {len(samples)} samples"
        )
    return [{CUSTOM: _custom_score(place, value)} for place, value in enumerate(found)]


def _custom_score(place: int, value: object) -> Score:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise ContractError(
            f"reward.custom must return numbers; score {place} is a {type(value).__name__}"
        )
    number = float(value)
    if not math.isfinite(number):
        return Score(value=None, failure=f"reward.custom returned {number}")
    return Score(value=number)


def assign_rewards(
    samples: Sequence[Sample],
    scores: Sequence[Mapping[str, Score]],
    weights_of: WeightsOf,
    *,
    on_failure: str,
    key: str | None = None,
) -> None:
    """Set ``scores`` and ``reward`` of each sample; a failed term leaves the reward None.

    ``key``: the part of each score that counts (``reward.key``); it becomes the score's value. Raises
    RewardError at the first failure when ``on_failure`` is "error".
    """
    for sample, terms in zip(samples, scores, strict=True):
        weights = weights_of(sample)
        sample.scores = terms if key is None else with_parts(terms, weights, key)
        sample.reward = weighted_sum(sample.scores, weights)
        if sample.reward is None and on_failure == "error":
            raise RewardError(_failure_text(sample, sample.scores, weights))


def with_parts(
    terms: Mapping[str, Score], weights: Mapping[str, float], key: str
) -> dict[str, Score]:
    """Return scores whose value is one of their parts; a term of weight 0 stays as it is.

    Raises BadInput, which names the parts, when a score that counts has no such part.
    """
    return {
        name: _part(name, score, key) if weights.get(name) else score
        for name, score in terms.items()
    }


def _part(name: str, score: Score, key: str) -> Score:
    if score.value is None:
        return score
    if key not in score.parts:
        have = ", ".join(map(repr, score.parts)) or "none"
        raise BadInput(
            f"reward.key: reward {name!r} gives no part {key!r}; its parts: {have}\n"
            "name one of them (reward.key, eval.reward_key), or leave the option out"
        )
    return replace(score, value=score.parts[key])


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
