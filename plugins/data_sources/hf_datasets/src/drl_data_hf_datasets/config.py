"""Options of ``hf_dataset``: the table ``[data.hf_dataset]``."""

from __future__ import annotations

from pathlib import Path

from drl.options import Field, Options


class HfDatasetOptions(Options):
    """Which rows and columns of a data set are used, and in which order."""

    path: Path = Field(description="Folder that save_to_disk wrote.")
    split: str | None = Field(
        None, min_length=1, description="Split to train on; the only one when unset."
    )
    text_column: str = Field("text", min_length=1, description="Column of the prompts.")
    image_column: str | None = Field(
        None,
        min_length=1,
        description="Column of the images; the only one of that type when unset.",
    )
    video_column: str | None = Field(
        None,
        min_length=1,
        description="Column of the videos; the only one of that type when unset.",
    )
    shuffle: bool = Field(
        True, description="Reorder the rows in every epoch, from the run seed and the epoch alone."
    )
