"""Group statistics of rewards, and the interval of a before/after difference.

Axes: ``N`` samples of a rollout. Groups are found by id, never by position, and may be uneven;
invalid entries are masked. Sums run in float64, results are float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatistics:
    """Figures of each group; axis ``Q`` runs over the groups in ascending order of their ids.

    ``ids`` ``(Q,)`` int64; ``place_N``: the group of each sample, an index into ``Q``; ``sizes_Q`` all
    members and ``counts_Q`` the valid ones, int64; ``means_Q``, ``stds_Q`` (unbiased),
    ``biased_stds_Q`` and ``largest_Q`` (largest absolute value) of the valid ones, float64. A mean or
    a largest value of no samples and a std of fewer than two are 0.
    """

    ids: Tensor
    place_N: Tensor
    sizes_Q: Tensor
    counts_Q: Tensor
    means_Q: Tensor
    stds_Q: Tensor
    biased_stds_Q: Tensor
    largest_Q: Tensor


def group_statistics(values_N: Tensor, group_ids_N: Tensor, valid_N: Tensor) -> GroupStatistics:
    """Return the statistics of every group; ``values_N`` may hold NaN where ``valid_N`` is False."""
    ids, place_N, sizes_Q = torch.unique(group_ids_N, return_inverse=True, return_counts=True)
    known_N = torch.where(valid_N, values_N.double(), 0.0)

    def total(rows_N: Tensor) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.float64).index_add_(0, place_N, rows_N)

    counts_Q = total(valid_N.double())
    means_Q = total(known_N) / counts_Q.clamp(min=1)
    squares_Q = total(torch.where(valid_N, (known_N - means_Q[place_N]) ** 2, 0.0))
    largest_Q = torch.zeros(len(ids), dtype=torch.float64)
    largest_Q.scatter_reduce_(0, place_N, known_N.abs(), "amax")
    return GroupStatistics(
        ids=ids,
        place_N=place_N,
        sizes_Q=sizes_Q,
        counts_Q=counts_Q.long(),
        means_Q=means_Q,
        stds_Q=(squares_Q / (counts_Q - 1).clamp(min=1)).sqrt(),
        biased_stds_Q=(squares_Q / counts_Q.clamp(min=1)).sqrt(),
        largest_Q=largest_Q,
    )


def group_mean(values_N: Tensor, group_ids_N: Tensor, valid_N: Tensor) -> Tensor:
    """Return for each sample the mean of the valid samples of its group, ``(N,)`` float32."""
    groups = group_statistics(values_N, group_ids_N, valid_N)
    return groups.means_Q[groups.place_N].float()


def group_std(
    values_N: Tensor, group_ids_N: Tensor, valid_N: Tensor, *, floor: float = 0.0
) -> Tensor:
    """Return for each sample the unbiased std of its group, ``(N,)`` float32.

    A std of at most ``floor`` times the group's largest absolute value is rounding noise and given as 0.
    """
    groups = group_statistics(values_N, group_ids_N, valid_N)
    stds_Q = groups.stds_Q * (groups.stds_Q > floor * groups.largest_Q)
    return stds_Q[groups.place_N].float()


class Interval(NamedTuple):
    """A difference of means with the ends of its interval."""

    difference: float
    low: float
    high: float


def bootstrap_interval(
    before: Mapping[str, Sequence[float]],
    after: Mapping[str, Sequence[float]],
    *,
    seed: int,
    draws: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Return the mean of ``after - before`` and its percentile interval, bootstrapped over words.

    Both map a word to its scores; score j of a word is the same noise before and after, so the
    differences are paired. Words are drawn with replacement and keep all their scores, because the
    scores of one word are not independent (cluster bootstrap; Efron and Tibshirani 1993, chapter 13).
    Raises ValueError when the two do not match or hold nothing.
    """
    unpaired = sorted(
        word
        for word in before.keys() | after.keys()
        if len(before.get(word, ())) != len(after.get(word, ()))
    )
    words = sorted(word for word in before if len(before[word]))
    if unpaired or not words:
        raise ValueError(
            f"before and after must hold equally many scores of the same words; differ in {unpaired[:5]}"
            if unpaired
            else "no scores to compare"
        )
    sums_W = np.array([np.subtract(after[word], before[word]).sum() for word in words])
    counts_W = np.array([len(before[word]) for word in words])
    generator = np.random.default_rng(seed)
    picks = generator.integers(len(words), size=(draws, len(words)))
    means = sums_W[picks].sum(1) / counts_W[picks].sum(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(sums_W.sum() / counts_W.sum()), float(low), float(high))
