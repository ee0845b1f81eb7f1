"""Options of ``grpo_guard``: the table ``[algorithm.grpo_guard]``."""

from __future__ import annotations

from drl.options import Field, Options


class GrpoGuardConfig(Options):
    """Clipped policy gradient with a ratio that is centred on 1 at every noise level (GRPO-Guard)."""

    clip_range: float = Field(
        1e-4,
        gt=0,
        lt=1,
        description="The normalised ratio is clipped to 1 plus or minus this.",
    )
