"""Declares the loss ``awm`` and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drl.api import Component, Problem, hookimpl

DRL_API = (1, 0)
LOSS, STRATEGY = "awm", "ode_and_return_last"


@hookimpl
def drl_register_losses() -> Sequence[Component]:
    """Offer advantage weighted matching."""
    return [
        Component(
            LOSS,
            "drl_loss_awm.loss:Awm",
            summary="Flow matching on generated samples, weighted by their advantage (AWM).",
            config="drl_loss_awm.config:AwmConfig",
            facts={"needs": ("rollout",), "step_share": "step_share"},
        )
    ]


@hookimpl
def drl_check_recipe(recipe: Any) -> Iterable[Problem]:
    """Refuse rollouts without final latents, and combinations in which the loss has no meaning."""
    if recipe.algorithm.loss != LOSS:
        return
    yield from _of_the_steps(recipe)
    if recipe.sampling.guidance_scale > 1 or (recipe.sampling.true_cfg_scale or 1) > 1:
        yield Problem(
            "sampling.guidance_scale",
            f"is above 1, but algorithm.loss '{LOSS}' raises the likelihood of what the model itself "
            "samples, and guided samples come from another distribution; set it to 1",
        )
    if recipe.train.num_steps_per_rollout is not None and recipe.train.num_steps_per_rollout > 1:
        yield Problem(
            "train.num_steps_per_rollout",
            f"is {recipe.train.num_steps_per_rollout}: from the second optimizer step on, "
            f"algorithm.loss '{LOSS}' trains on samples of earlier weights without correcting for it",
            "warning",
        )


def _of_the_steps(recipe: Any) -> Iterable[Problem]:
    """Final latents come back from deterministic rollouts, and from those that keep every latent."""
    strategy, count = recipe.sde.step_strategy, recipe.sde.num_steps
    if strategy is None and 0 < count < recipe.sampling.num_steps:
        yield Problem(
            "sde.num_steps",
            f"is {count}, which keeps the latents of the first {count} steps, but algorithm.loss "
            f"'{LOSS}' trains on the final ones and on no step: set it to 0",
        )
    elif strategy in {"sde_window", "epoch_global_random_choice"}:
        yield Problem(
            "sde.step_strategy",
            f"{strategy!r} keeps the latents of stochastic steps, but algorithm.loss '{LOSS}' trains "
            f"on the final ones: use '{STRATEGY}' (deterministic) or 'all' (every step stochastic)",
        )
    elif strategy == "all" and recipe.sde.type == "ode":
        yield Problem(
            "sde.step_strategy",
            f"is 'all', but sde.type 'ode' has no stochastic step; use '{STRATEGY}'",
        )
    if recipe.rollout.shared_start and strategy != "all":
        yield Problem(
            "rollout.shared_start",
            f"is true, but the rollouts of algorithm.loss '{LOSS}' are deterministic: a group would be "
            "one picture many times; set it to false, or sde.step_strategy = 'all'",
        )
