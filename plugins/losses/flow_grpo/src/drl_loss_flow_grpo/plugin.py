"""Declares the loss ``policy_loss``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_losses() -> Sequence[Component]:
    """Offer the clipped policy loss."""
    return [
        Component(
            "policy_loss",
            "drl_loss_flow_grpo.loss:PolicyLoss",
            summary="Clipped policy gradient on the log-probability of denoising steps (Flow-GRPO).",
            config="drl_loss_flow_grpo.config:PolicyLossConfig",
            facts={"needs": ("rollout", "old_log_prob", "transition", "guidance")},
        )
    ]
