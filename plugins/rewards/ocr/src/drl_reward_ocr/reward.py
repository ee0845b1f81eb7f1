"""``OcrReward``: how much of the wanted text can be read in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drl.api import Context, Golden, Media, Prompt, Reward, RewardError, Sample, Score, Workers
from drl_reward_ocr.config import OcrOptions
from drl_reward_ocr.pictures import check_pixels, to_picture
from drl_reward_ocr.text import check_target, closeness, target_of

if TYPE_CHECKING:
    from drl_reward_ocr.recogniser import Reading, Recogniser


class OcrReward(Reward):
    """One minus the share of the target that needs an edit; of videos the first frame is read.

    Parts: ``exact`` 1 or 0, ``distance`` in edits. A sample without target, with pixels out of
    range or that the recogniser fails on gets no value, and the reason.
    """

    media = frozenset({"image", "video"})

    def __init__(self, options: OcrOptions, context: Context) -> None:
        super().__init__(options, context)
        self.recogniser: Recogniser | None = None

    def workers(self) -> Workers:
        """Return ``num_workers`` CPU processes."""
        return Workers(processes=self.options.num_workers)

    async def start(self) -> None:
        """Load the recogniser and read a blank picture once."""
        from drl_reward_ocr.recogniser import Recogniser

        self.recogniser = Recogniser(self.options)

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """Read all pictures in batches; see the class for what a score holds."""
        if self.recogniser is None:
            raise RewardError("reward ocr: score() was called before start()")
        problems = [check_target(s.prompt) or check_pixels(s.media) for s in samples]
        readable = [
            sample.media
            for sample, problem in zip(samples, problems, strict=True)
            if problem is None and sample.media is not None
        ]
        readings = iter(self.recogniser.read([to_picture(media) for media in readable]))
        return [
            self._score(sample, next(readings) if problem is None else problem)
            for sample, problem in zip(samples, problems, strict=True)
        ]

    def _score(self, sample: Sample, reading: Reading) -> Score:
        if isinstance(reading, str):
            return Score(value=None, failure=f"reward ocr: {reading}")
        close = closeness(
            target_of(sample.prompt), reading, case_sensitive=self.options.case_sensitive
        )
        exact = float(close.exact)
        value = exact if self.options.similarity == "exact" else close.similarity
        return Score(value=value, parts={"exact": exact, "distance": float(close.distance)})

    def golden(self) -> Golden:
        """Return the word OPEN as a picture, and a blank picture."""
        prompt = Prompt(row=0, text='a sign that says "OPEN"')
        good = Sample(index=0, group_index=0, member=0, prompt=prompt, seed=0)
        bad = Sample(index=1, group_index=0, member=1, prompt=prompt, seed=1)
        good.media, bad.media = render("OPEN"), render("")
        return Golden(good=good, bad=bad, margin=0.5)

    async def close(self) -> None:
        """Let go of the recogniser."""
        self.recogniser = None


def render(text: str, width: int = 192, height: int = 64) -> Media:
    """Draw black text on white, centred, in Pillow's built-in font: pixels ``(3, 1, H, W)``."""
    import numpy as np
    import torch
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, height), "white")
    font = ImageFont.load_default(height * 0.75)
    ImageDraw.Draw(image).text((width / 2, height / 2), text, "black", font, anchor="mm")
    pixels_HWC = torch.from_numpy(np.array(image, np.float32)) / 255.0
    return Media(pixels=pixels_HWC.permute(2, 0, 1).unsqueeze(1).contiguous())
