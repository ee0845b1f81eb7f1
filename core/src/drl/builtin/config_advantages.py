"""Options of the advantage estimators in core."""

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


class GdpoOptions(Options):
    """How reward terms are normalised, each within its group, before they are summed."""

    batch_normalization: bool = Field(
        True,
        description="Divide the sum by its std over the rollout, so that more terms are not larger steps.",
    )
    std_floor: float = Field(
        1e-6,
        ge=0,
        description="A term's std up to this share of its largest score is rounding noise: it adds 0.",
    )
