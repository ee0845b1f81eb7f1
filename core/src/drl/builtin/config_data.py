"""Options of the data sources in core."""

from __future__ import annotations

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
