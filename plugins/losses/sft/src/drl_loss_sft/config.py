"""Options of ``sft_loss``: the table ``[algorithm.sft_loss]``."""

from __future__ import annotations

from typing import Literal

from drl.options import Field, Options


class SftLossConfig(Options):
    """Flow matching on recorded images: the squared error of the velocity."""

    sigma: Literal["grid", "logit_normal"] = Field(
        "grid",
        description="Where noise levels are drawn: evenly from a shifted grid, or logit-normally.",
    )
    flow_shift: float = Field(
        1.0, gt=0, description="Shift of the grid; above 1 it has more points at high noise."
    )
    sigma_buckets: int = Field(
        0, ge=0, le=100, description="Also log the loss of this many equal ranges of sigma."
    )
