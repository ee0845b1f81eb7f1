"""Declares the loss ``sft_loss``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_losses() -> Sequence[Component]:
    """Offer supervised fine-tuning."""
    return [
        Component(
            "sft_loss",
            "drl_loss_sft.loss:SftLoss",
            summary="Flow matching on recorded images: the squared error of the velocity.",
            config="drl_loss_sft.config:SftLossConfig",
            facts={"needs": ()},
        )
    ]
