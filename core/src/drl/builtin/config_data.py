"""Options of the data sources in core."""

from __future__ import annotations

from pathlib import Path

from drl.options import Field, Options


class JsonlOptions(Options):
    """Which rows of the file are used, and in which order."""

    shuffle: bool = Field(
        default=False,
        description="Reorder the rows in every epoch, from the run seed and the epoch alone.",
    )
    limit: int | None = Field(
        default=None, ge=1, description="Use the first rows of the file only."
    )


class ImageFolderOptions(Options):
    """Which pictures are used, and in which order."""

    path: Path = Field(
        description="Folder of pictures, each with a caption in NAME.txt or in metadata.jsonl."
    )
    shuffle: bool = Field(
        default=True,
        description="Reorder the pictures in every epoch, from the run seed and the epoch alone.",
    )
