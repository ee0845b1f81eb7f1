"""Options of the reward ``ocr``."""

from __future__ import annotations

from typing import Literal

from drl.options import Field, Options


class OcrOptions(Options):
    """How text is read and compared."""

    num_workers: int = Field(
        default=1, ge=0, description="Processes that read; 0 reads in the driver."
    )
    threads: int = Field(default=1, ge=1, description="Threads of one recogniser call.")
    batch_size: int = Field(default=16, ge=1, description="Most pictures in one recogniser call.")
    image_width: int | None = Field(
        default=None,
        ge=16,
        le=4096,
        description="Least width of the recogniser's input, which is 48 high: narrower pictures are "
        "padded to it. Unset: the width that the picture has at that height.",
    )
    detect: bool = Field(
        default=False,
        description="Find text lines first, then read each; for pictures that are not one line.",
    )
    similarity: Literal["levenshtein", "exact"] = Field(
        default="levenshtein",
        description='"levenshtein": 1 - edits / length of the target; "exact": 1 or 0.',
    )
    case_sensitive: bool = Field(default=False, description="Tell capital letters from small ones.")
