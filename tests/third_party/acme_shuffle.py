"""A third-party plugin of an advantage estimator that gives every sample another one's advantage."""

from __future__ import annotations

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_advantages():
    return [
        Component(
            "acme_shuffled",
            "acme_shuffle_estimator:Shuffled",
            summary="Advantages of grpo, dealt out anew.",
            config="drl.builtin.config_advantages:GrpoOptions",
        )
    ]
