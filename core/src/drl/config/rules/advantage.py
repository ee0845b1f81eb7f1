"""Rules of the advantage estimator: groups to compare in, terms to weigh, and losses that read none."""

from __future__ import annotations

from collections.abc import Iterator

from drl.config.automatic import needs
from drl.config.draft import Draft
from drl.errors import Problem

ESTIMATOR = "algorithm.advantage_estimator"


def group_size(draft: Draft) -> Iterator[Problem]:
    """A group of one has no mean to compare with."""
    if not needs(draft, "rollout") or draft.get("rollout.n_samples_per_prompt") > 1:
        return
    alone = "a sample is its own mean: every advantage is 0 and nothing is learned"
    if draft.get(ESTIMATOR) == "grpo" and draft.option("advantage", "grpo", "globalize_mean"):
        alone = "a sample is compared with the mean of the rollout"
    yield Problem(
        "rollout.n_samples_per_prompt",
        f"is 1: the standard deviation is not normalised, and {alone}",
        "warning",
    )


def mean_and_deviation(draft: Draft) -> Iterator[Problem]:
    """A mean of the batch with a deviation of the group mixes two scales."""
    name = draft.get(ESTIMATOR)
    mean, std, normalized = (
        draft.option("advantage", name, key)
        for key in ("globalize_mean", "globalize_std", "std_normalization")
    )
    if needs(draft, "rollout") and mean and normalized and not std:
        yield Problem(
            f"algorithm.{name}.globalize_mean",
            "with the standard deviation of each group mixes two scales; "
            "set globalize_std = true or std_normalization = false",
            "warning",
        )


def unused_switches(draft: Draft) -> Iterator[Problem]:
    """Without a division nothing is said about what would divide."""
    if draft.get(ESTIMATOR) != "grpo" or draft.option("advantage", "grpo", "std_normalization"):
        return
    if draft.option("advantage", "grpo", "globalize_std"):
        yield Problem(
            "algorithm.grpo.globalize_std", "is not used: std_normalization is false", "warning"
        )


def several_terms(draft: Draft) -> Iterator[Problem]:
    """``gdpo`` is about the scales of several terms."""
    if draft.get(ESTIMATOR) != "gdpo" or not needs(draft, "rollout"):
        return
    counted = [term for term in draft.get("reward.terms") if term.weight != 0]
    if len(counted) < 2:
        yield Problem(
            ESTIMATOR,
            "'gdpo' normalises each of several reward.terms, and there is one: its values are those of "
            "'grpo', divided by their std over the rollout",
            "warning",
        )


def without_rewards(draft: Draft) -> Iterator[Problem]:
    """A loss on recorded data reads no advantage."""
    if needs(draft, "rollout"):
        return
    for key in (ESTIMATOR, "algorithm.adv_clip_max"):
        if draft.changed(key):
            yield Problem(
                key,
                f"is not used: algorithm.loss {draft.get('algorithm.loss')!r} trains on recorded data, "
                "without rewards",
                "warning",
            )


ADVANTAGE_RULES = (
    group_size,
    mean_and_deviation,
    unused_switches,
    several_terms,
    without_rewards,
)
