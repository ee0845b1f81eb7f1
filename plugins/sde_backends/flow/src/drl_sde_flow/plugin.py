"""Declares the SDE backends ``sde`` and ``ode``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_sde_backends() -> Sequence[Component]:
    """Offer the stochastic and the deterministic step of flow matching."""
    return [
        Component(
            "sde",
            "drl_sde_flow.flow:FlowSde",
            summary="Flow-SDE step with a Gaussian log-probability, as in Flow-GRPO.",
            facts={"has_density": True, "last_step_has_variance": True},
        ),
        Component(
            "ode",
            "drl_sde_flow.flow:FlowOde",
            summary="Deterministic Euler step without a density.",
            facts={"has_density": False},
        ),
    ]
