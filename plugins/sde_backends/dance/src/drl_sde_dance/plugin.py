"""Declares the SDE backend ``dance``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

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
