"""How small a picture is as a JPEG file."""

import io
from collections.abc import Sequence

from PIL import Image

from drl.api import Reward, Sample, Score, Workers


class JpegReward(Reward):
    """Minus the size of the first frame as a JPEG file in KB; plus, with ``compress = false``."""

    media = frozenset({"image", "video"})

    def workers(self) -> Workers:
        return Workers(processes=0)  # too cheap for a process of its own

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        return [self.score_one(sample) for sample in samples]

    def score_one(self, sample: Sample) -> Score:
        pixels = sample.media.pixels if sample.media else None  # (C, F, H, W) in [0, 1]
        if pixels is None or not 0 <= pixels.min() <= pixels.max() <= 1:
            return Score(value=None, failure="jpeg: no picture with pixels in [0, 1]")
        frame = pixels[:, 0].mul(255).round().byte().expand(3, -1, -1)
        image, file = Image.fromarray(frame.permute(1, 2, 0).numpy()), io.BytesIO()
        image.save(file, "JPEG", quality=self.options.quality)
        kilobytes = len(file.getvalue()) / 1024
        return Score(value=-kilobytes if self.options.compress else kilobytes)
