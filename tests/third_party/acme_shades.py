"""A third-party plugin of two rewards on very different scales: how red, and how green, a picture is."""

from __future__ import annotations

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_rewards():
    return [
        Component("acme_red", "acme_shades_rewards:Red", summary="Mean of red, in millionths."),
        Component(
            "acme_green", "acme_shades_rewards:Green", summary="Mean of green, in hundredths."
        ),
    ]
