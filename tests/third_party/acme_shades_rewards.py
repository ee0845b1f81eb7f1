"""Means of one colour; ``Red`` counts in millionths, ``Green`` in hundredths."""

from __future__ import annotations

from drl.api import Reward, Score, Workers


class Red(Reward):
    channel, unit = 0, 1e6

    def workers(self):
        return Workers(processes=0)

    async def score(self, samples):
        return [
            Score(value=float(sample.media.pixels[self.channel].mean()) * self.unit)
            for sample in samples
        ]


class Green(Red):
    channel, unit = 1, 1e2
