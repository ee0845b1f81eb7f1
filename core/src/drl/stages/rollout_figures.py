"""The figures of a rollout for the log, and the recipe's own functions that see them first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from drl.errors import ContractError
from drl.stages.advantage import reward_metrics
from drl.types import Advantages, Rollout, Sample

if TYPE_CHECKING:
    from drl.run import Run


def log_rollout(run: Run, rollout: Rollout, seconds: float) -> None:
    """Show a rollout to ``rollout.custom_log``, which may add figures, or leave drl's own out."""
    function = run.functions.get("rollout.custom_log")
    if function is None:
        return
    extra = dict(rollout.metrics)
    answer = function(rollout.rollout_id, run, rollout.samples, extra, seconds)
    rollout.logged = not _suppressed("rollout.custom_log", answer)
    rollout.metrics = checked_figures("rollout.custom_log", extra)


def log_evaluation(
    run: Run, done: int, samples: Mapping[str, Sequence[Sample]]
) -> tuple[dict[str, float], bool]:
    """Show an evaluation to ``rollout.custom_eval_log``; return figures to add, and whether to log."""
    function = run.functions.get("rollout.custom_eval_log")
    extra: dict[str, float] = {}
    if function is None:
        return extra, True
    answer = function(done, run, samples, extra)
    logged = not _suppressed("rollout.custom_eval_log", answer)
    return checked_figures("rollout.custom_eval_log", extra), logged


def _suppressed(option: str, answer: object) -> bool:
    if answer is None or isinstance(answer, bool):
        return bool(answer)
    raise ContractError(
        f"{option} must return True (leave out drl's own figures) or False, got {answer!r}"
    )


def checked_figures(option: str, figures: Mapping[str, object]) -> dict[str, float]:
    """Return figures as floats; ContractError names the one that is no number."""
    found = {}
    for name, value in figures.items():
        try:
            found[name] = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise ContractError(
                f"{option}: the figure {name!r} must be a number, got {value!r}"
            ) from error
    return found


def rollout_figures(rollout: Rollout, advantages: Advantages | None) -> dict[str, float]:
    """Return the figures of rewards, groups and draws; none of drl's own when a function said so."""
    if not rollout.logged:
        return dict(rollout.metrics)
    figures = reward_metrics(rollout)
    if advantages is not None:
        figures |= advantages.statistics
        figures |= normalised_figures(rollout, advantages)
    return figures | dict(rollout.metrics)


def normalised_figures(rollout: Rollout, advantages: Advantages) -> dict[str, float]:
    """Return the figures of the advantages of samples with a reward; the std is biased."""
    known = torch.tensor([sample.reward is not None for sample in rollout.samples])
    values = advantages.values.double()[known]
    if not len(values):
        return {}
    return {
        "rollout/reward/norm_mean": values.mean().item(),
        "rollout/reward/norm_std": values.std(correction=0).item(),
        "rollout/reward/norm_min": values.min().item(),
        "rollout/reward/norm_max": values.max().item(),
        "rollout/reward/norm_median": values.median().item(),
        "rollout/reward/norm_num_samples": float(len(values)),
    }
