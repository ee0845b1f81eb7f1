"""The loss that ships with core: ``custom_loss``, whose parts are functions of the recipe."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_losses() -> Sequence[Component]:
    """Offer ``custom_loss``."""
    return [
        Component(
            "custom_loss",
            "drl.builtin.loss_custom:CustomLoss",
            summary="Pairs, inputs and formula are functions that the recipe names.",
            facts={"needs_option": "algorithm.custom_needs"},
        )
    ]
