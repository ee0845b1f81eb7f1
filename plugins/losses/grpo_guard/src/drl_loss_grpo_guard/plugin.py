"""Declares the loss ``grpo_guard`` and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drl.api import Component, Problem, hookimpl

DRL_API = (1, 0)
FLOW_SDE = ("sde", "dance")
"""Backends whose mean and noise have the form of Flow-SDE."""


@hookimpl
def drl_register_losses() -> Sequence[Component]:
    """Offer GRPO-Guard."""
    return [
        Component(
            "grpo_guard",
            "drl_loss_grpo_guard.loss:GrpoGuard",
            summary="Flow-GRPO with a normalised ratio and steps of equal weight (GRPO-Guard).",
            config="drl_loss_grpo_guard.config:GrpoGuardConfig",
            facts={
                "needs": (
                    "rollout",
                    "old_log_prob",
                    "transition",
                    "old_prediction",
                    "guidance",
                ),
                "sde_types": FLOW_SDE,
            },
        )
    ]


@hookimpl
def drl_check_recipe(recipe: Any) -> Iterable[Problem]:
    """Refuse steps of another form than Flow-SDE's, and an old policy that did not make the rollout."""
    if recipe.algorithm.loss != "grpo_guard":
        return
    if recipe.sde.type == "ode":
        pass  # core says that it has no density
    elif recipe.sde.type not in FLOW_SDE:
        yield Problem(
            "sde.type",
            f"is {recipe.sde.type!r}, but algorithm.loss 'grpo_guard' normalises the ratio of Flow-SDE's "
            "Gaussian steps and knows no other form of them: use 'sde', or 'dance' where it is installed",
        )
    elif recipe.sde.log_prob_no_const:
        yield Problem(
            "sde.log_prob_no_const",
            "is true, but algorithm.loss 'grpo_guard' normalises the ratio of two Gaussian densities, "
            "which needs their constants; set it to false",
        )
    if recipe.ema.enabled and recipe.ema.rollout_policy != "ema":
        yield Problem(
            "ema.rollout_policy",
            "is 'live', but the average is the old policy of algorithm.loss 'grpo_guard', and it must "
            "be what made the samples: set it to 'ema', or ema.enabled = false",
        )
