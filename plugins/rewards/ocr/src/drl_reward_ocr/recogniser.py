"""The text recogniser of rapidocr: pictures in, lines out.

Reading one picture never depends on its neighbours: the recogniser pads a batch to its widest
picture, so pictures are batched by size, and the padding follows from the picture alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import cv2
import numpy as np
from rapidocr import RapidOCR
from rapidocr.ch_ppocr_rec import TextRecInput
from rapidocr.inference_engine.onnxruntime.main import ONNXRuntimeError
from rapidocr.main import RapidOCRError

from drl_reward_ocr.text import Line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from drl_reward_ocr.config import OcrOptions

Picture: TypeAlias = "NDArray[np.uint8]"
Reading: TypeAlias = "list[Line] | str"
"""The lines of a picture, or the reason why it could not be read."""

INPUT_HEIGHT = 48
FAILURES = (ONNXRuntimeError, RapidOCRError, cv2.error, ValueError, RuntimeError)


class Recogniser:
    """Reads pictures ``(H, W, 3)`` uint8, red first as the reward's reference implementation does."""

    def __init__(self, options: OcrOptions) -> None:
        self.options = options
        width = options.image_width or INPUT_HEIGHT
        # Any: rapidocr annotates its lazily loaded parts as None and its answers as a union
        self.engine: Any = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": 0.0,
                "EngineConfig.onnxruntime.intra_op_num_threads": options.threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Rec.rec_img_shape": [3, INPUT_HEIGHT, width],
                "Rec.rec_batch_num": options.batch_size,
            }
        )
        blank = np.full((INPUT_HEIGHT, 3 * INPUT_HEIGHT, 3), 255, np.uint8)
        # rapidocr loads a model at its first call
        self.engine(blank, use_det=options.detect, use_cls=False, use_rec=True)
        self.engine(blank, use_det=False, use_cls=False, use_rec=True)

    def read(self, pictures: Sequence[Picture]) -> list[Reading]:
        """Return what each picture says, in order; one that cannot be read gets the reason."""
        return read_by_size(pictures, self.detect_lines if self.options.detect else self.read_lines)

    def read_lines(self, pictures: Sequence[Picture]) -> list[list[Line]]:
        """Read pictures of one size, each as a single line."""
        found = self.engine.text_rec(TextRecInput(img=list(pictures), return_word_box=False))
        return [[Line(text, score)] for text, score in zip(found.txts, found.scores, strict=True)]

    def detect_lines(self, pictures: Sequence[Picture]) -> list[list[Line]]:
        """Find the lines of each picture and read them."""
        return [self._detected(picture) for picture in pictures]

    def _detected(self, picture: Picture) -> list[Line]:
        found = self.engine(picture, use_det=True, use_cls=False, use_rec=True)
        if found.txts is None:
            return []
        return [Line(text, score) for text, score in zip(found.txts, found.scores, strict=True)]


def read_by_size(
    pictures: Sequence[Picture], read: Callable[[Sequence[Picture]], list[list[Line]]]
) -> list[Reading]:
    """Call ``read`` once per picture size and put the answers back in order.

    When a call fails, its pictures are read one by one, so that only those at fault fail.
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place, picture in enumerate(pictures):
        places.setdefault(picture.shape, []).append(place)
    readings: list[Reading] = [""] * len(pictures)
    for members in places.values():
        chosen = [pictures[place] for place in members]
        for place, reading in zip(members, _read_or_reason(chosen, read), strict=True):
            readings[place] = reading
    return readings


def _read_or_reason(
    pictures: Sequence[Picture], read: Callable[[Sequence[Picture]], list[list[Line]]]
) -> list[Reading]:
    try:
        return list(read(pictures))
    except FAILURES as error:
        if len(pictures) == 1:
            return [f"the recogniser failed: {type(error).__name__}: {_last_line(error)}"]
    return [reading for picture in pictures for reading in _read_or_reason([picture], read)]


def _last_line(error: Exception) -> str:
    # rapidocr puts a whole traceback into its message
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else "no message"
