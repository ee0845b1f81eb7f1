"""Declares the SDE backend ``cps`` and the rule that its log-probability has one form only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from drl.api import Component, Problem, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_sde_backends() -> Sequence[Component]:
    """Offer coefficients-preserving sampling."""
    return [
        Component(
            "cps",
            "drl_sde_cps.cps:CpsSde",
            summary="Coefficients-preserving sampling: noise without excess variance.",
            facts={
                "has_density": True,
                "log_prob_no_const": True,
                "last_step_has_variance": False,
            },
        )
    ]


@hookimpl
def drl_check_recipe(recipe: Any) -> Iterable[Problem]:
    """Ask for the log-probability form that this backend has."""
    if recipe.sde.type != "cps" or recipe.sde.log_prob_no_const:
        return []
    return [
        Problem(
            "sde.log_prob_no_const",
            "is false, but sde.type 'cps' has a log-probability without constants only; set it to true",
        )
    ]
