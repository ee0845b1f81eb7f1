"""Declares the SDE backend ``dance`` and the rule that its noise level is above 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drl.api import Component, Problem, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_sde_backends() -> Sequence[Component]:
    """Offer the step of constant noise."""
    return [
        Component(
            "dance",
            "drl_sde_dance.dance:DanceSde",
            summary="Flow-SDE step with the same diffusion scale at every sigma, as in DanceGRPO.",
            facts={"has_density": True, "last_step_has_variance": True},
        )
    ]


@hookimpl
def drl_check_recipe(recipe: Any) -> Iterable[Problem]:
    """Refuse rollouts whose steps would be without noise.

    A loss on transitions is refused by core, whatever the backend; one without rollouts takes no step.
    """
    if recipe.sde.type != "dance" or recipe.sde.noise_level > 0:
        return []
    loss = recipe.catalog.find("loss", recipe.algorithm.loss)
    needs = loss.component.facts.get("needs", ())
    if "transition" in needs or "rollout" not in needs:
        return []
    return [
        Problem(
            "sde.noise_level",
            "is 0, but sde.type 'dance' has no density without noise; set it above 0 "
            "(0.3 is usual), or use sde.type 'ode'",
        )
    ]
