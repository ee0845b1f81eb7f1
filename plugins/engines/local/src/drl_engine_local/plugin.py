"""Registers the engine ``local``."""

from __future__ import annotations

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_engines() -> list[Component]:
    """Offer the engine."""
    return [
        Component(
            "local",
            "drl_engine_local.engine:LocalEngine",
            summary="Samples in the trainer's own process; shares frozen weights with it.",
            config="drl_engine_local.config:LocalOptions",
        )
    ]
