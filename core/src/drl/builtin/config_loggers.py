"""Options of the loggers in core."""

from __future__ import annotations

from drl.options import Field, Options


class ConsoleOptions(Options):
    """How a run is shown while it goes on."""

    live: bool = Field(
        default=True,
        description="Show a live view when there is a terminal; false: plain lines always.",
    )
    refresh_per_second: float = Field(
        default=4.0, gt=0, le=30, description="How often the live view is drawn."
    )
