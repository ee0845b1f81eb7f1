"""The step strategies that ship with core: windows, random choices, every step, and none at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from drl.api import Component, Problem, hookimpl

if TYPE_CHECKING:
    from drl.config import Recipe

DRL_API = (1, 0)


@hookimpl
def drl_register_step_strategies() -> Sequence[Component]:
    """Offer the ways to choose the stochastic steps of a group."""
    return [
        Component(
            "sde_window",
            "drl.builtin.steps_window:SdeWindow",
            summary="A run of neighbouring steps at a random place, one place per group.",
            config="drl.builtin.config_steps:SdeWindowOptions",
        ),
        Component(
            "epoch_global_random_choice",
            "drl.builtin.steps_global:EpochGlobalRandomChoice",
            summary="A random choice of the candidate steps, the same for a whole rollout.",
            config="drl.builtin.config_steps:EpochGlobalRandomChoiceOptions",
        ),
        Component(
            "all",
            "drl.builtin.steps_all:AllSteps",
            summary="Every denoising step is stochastic and trained.",
        ),
        Component(
            "ode_and_return_last",
            "drl.builtin.steps_last:OdeAndReturnLast",
            summary="No stochastic step; only the final latents come back, for losses that noise them anew.",
        ),
    ]


@hookimpl
def drl_check_recipe(recipe: Recipe) -> Iterable[Problem]:
    """Say which option asks for steps that the sampler does not have."""
    from drl.builtin.config_steps import EpochGlobalRandomChoiceOptions, SdeWindowOptions
    from drl.builtin.steps_rules import candidate_problems, window_problems

    name = recipe.sde.step_strategy
    if name not in ("sde_window", "epoch_global_random_choice"):
        return []
    count, num_steps = recipe.sde.num_steps, recipe.sampling.num_steps
    options = recipe.options("step_strategy", name)
    if isinstance(options, SdeWindowOptions):
        return window_problems(options.range, count, num_steps)
    if isinstance(options, EpochGlobalRandomChoiceOptions):
        return candidate_problems(options.candidate_steps, count, num_steps)
    return []
