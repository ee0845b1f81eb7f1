"""A third-party plugin of rewards that fail, each in its own way."""

from __future__ import annotations

from drl.api import Component, hookimpl

DRL_API = (1, 0)

REWARDS = {
    "acme_nan": "Nan",
    "acme_none": "Missing",
    "acme_inf": "Infinite",
    "acme_nothing": "Nothing",
    "acme_equal": "Equal",
    "acme_worker": "InWorker",
    "acme_stuck": "Stuck",
}


@hookimpl
def drl_register_rewards():
    return [
        Component(name, f"acme_rewards_classes:{target}", summary="A reward with a fault.")
        for name, target in REWARDS.items()
    ]
