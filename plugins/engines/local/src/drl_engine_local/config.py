"""Options of the engine ``local``, the recipe table ``[rollout.local]``."""

from __future__ import annotations

from typing import Literal

from drl.options import Field, Options


class LocalOptions(Options):
    """How the embedded engine fills its batches."""

    rows: int = Field(
        8,
        ge=1,
        description="Samples denoised together. Every forward runs at this row count, filled across "
        "requests and padded at the end, so that a sample does not depend on its neighbours; that holds "
        "for 1 to 4 rows and for multiples of 4.",
    )
    weights: Literal["fp32", "forward"] = Field(
        "fp32",
        description="Precision of the engine's weights: fp32, rounded in the forward as the trainer's "
        "are, or the forward's own, which halves their memory.",
    )
    wait_ms: float = Field(
        5.0,
        ge=0,
        le=1000,
        description="How long a batch that is not full waits for the next request, in milliseconds.",
    )
