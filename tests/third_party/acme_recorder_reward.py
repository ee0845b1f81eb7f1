"""The reward of acme_recorder: smooth in the pixels, so that tiny differences stay tiny."""

from __future__ import annotations

from drl.api import Reward, Score, Workers


class Tone(Reward):
    """Mean of the red channel minus the mean of the blue one."""

    def workers(self):
        return Workers(processes=0)

    async def score(self, samples):
        means = [sample.media.pixels.double().mean((1, 2, 3)) for sample in samples]
        return [Score(value=float(mean[0] - mean[2])) for mean in means]
