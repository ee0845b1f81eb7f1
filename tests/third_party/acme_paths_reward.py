"""A reward that a recipe names by its path; its worker imports this module and no model."""

from __future__ import annotations

from drl.api import Context, Workers
from drl_reward_jpeg.config import JpegOptions
from drl_reward_jpeg.reward import JpegReward


class Jpeg(JpegReward):
    def __init__(self, options: None, context: Context) -> None:
        super().__init__(JpegOptions(), context)

    def workers(self) -> Workers:
        """Score in a process of its own."""
        return Workers(processes=1)
