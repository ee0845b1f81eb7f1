"""Offers the reward ``jpeg``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_rewards() -> Sequence[Component]:
    """Offer ``jpeg``."""
    return [
        Component(
            "jpeg",
            "drl_reward_jpeg.reward:JpegReward",
            summary="How small, or how large, the image is as a JPEG file.",
            config="drl_reward_jpeg.config:JpegOptions",
        )
    ]
