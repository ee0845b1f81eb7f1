"""The advantage estimators that ship with core: ``grpo`` and ``gdpo``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_advantages() -> Sequence[Component]:
    """Offer ``grpo`` and ``gdpo``."""
    return [
        Component(
            "grpo",
            "drl.builtin.advantage_grpo:Grpo",
            summary="Reward minus the mean of its group, divided by the standard deviation.",
            config="drl.builtin.config_advantages:GrpoOptions",
        ),
        Component(
            "gdpo",
            "drl.builtin.advantage_gdpo:Gdpo",
            summary="Each reward term normalised within its group, then the weighted sum (GDPO).",
            config="drl.builtin.config_advantages:GdpoOptions",
        ),
    ]
