"""Rewards from the redness of a picture, and what can go wrong with them."""

from __future__ import annotations

import math
import time

from drl.api import Reward, Score, Workers


class Tone(Reward):
    """Mean of the red channel; ``fault`` replaces the scores of member 1."""

    def workers(self):
        return Workers(processes=0)

    async def score(self, samples):
        return [self.score_one(sample) for sample in samples]

    def score_one(self, sample):
        value = Score(value=float(sample.media.pixels[0].double().mean()))
        return self.fault() if sample.member == 1 else value


class Nan(Tone):
    def fault(self):
        return Score(value=math.nan)


class Missing(Tone):
    def fault(self):
        return Score(value=None, failure="acme: no face found")


class Infinite(Tone):
    def fault(self):
        return Score(value=math.inf)


class Nothing(Tone):
    def score_one(self, sample):
        return Score(value=None, failure="acme: server is down")


class Equal(Tone):
    def score_one(self, sample):
        return Score(value=0.1)


class InWorker(Tone):
    """Scores in a process of its own."""

    def workers(self):
        return Workers(processes=1)

    def score_one(self, sample):
        return Score(value=float(sample.media.pixels[0].double().mean()))


class Stuck(InWorker):
    """Never comes back from its first picture, and says when it has begun."""

    def score_one(self, sample):
        (self.context.run_dir / "scoring").touch()
        time.sleep(3600)
