"""Options of the advantage estimator in core."""

from __future__ import annotations

from drl.options import Field, Options


class GrpoOptions(Options):
    """How rewards are normalised within their group."""

    std_normalization: bool = Field(
        True, description="Divide by the standard deviation; false is Dr. GRPO."
    )
    globalize_mean: bool = Field(
        False, description="Subtract the mean of the whole rollout instead of the group's."
    )
    globalize_std: bool = Field(
        False, description="Divide by the std of the whole rollout instead of the group's."
    )
    std_floor: float = Field(
        1e-6,
        ge=0,
        description="A std up to this share of the largest reward is rounding noise: advantage 0.",
    )
