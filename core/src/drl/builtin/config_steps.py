"""Options of the step strategies in core."""

from __future__ import annotations

from drl.options import Field, Options


class SdeWindowOptions(Options):
    """Where the window of stochastic steps may lie; sde.num_steps is its length."""

    range: tuple[int, int] | None = Field(
        None,
        description="First step and end of the window's range, end excluded; unset: all steps.",
    )


class EpochGlobalRandomChoiceOptions(Options):
    """Which steps may be stochastic; sde.num_steps of them are in each rollout."""

    candidate_steps: tuple[int, ...] = Field(
        (),
        description="Steps to choose from. No default: what is worth training depends on the sigmas.",
    )
