"""Offers the reward ``ocr``."""

from __future__ import annotations

from collections.abc import Sequence

from drl.api import Component, hookimpl

DRL_API = (1, 0)


@hookimpl
def drl_register_rewards() -> Sequence[Component]:
    """Offer ``ocr``."""
    return [
        Component(
            "ocr",
            "drl_reward_ocr.reward:OcrReward",
            summary="How much of the text that the prompt quotes can be read in the image.",
            config="drl_reward_ocr.config:OcrOptions",
        )
    ]
