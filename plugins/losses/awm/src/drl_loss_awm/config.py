"""Options of ``awm``: the table ``[algorithm.awm]``."""

from __future__ import annotations

from typing import Literal

from drl.options import Field, Options


class AwmConfig(Options):
    """Flow matching on the rollout's own results, weighted by their advantage (AWM)."""

    step_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Noise levels per sample, so pairs, as a share of the sampling steps.",
    )
    sigma: Literal["rollout", "logit_normal"] = Field(
        "rollout",
        description="Where levels are drawn: the rollout's own steps, or a logit-normal.",
    )
    timestep_fraction: float = Field(
        0.9, gt=0, le=1, description="With 'rollout', the first share of the steps is drawn from."
    )
    flow_shift: float = Field(
        3.0, gt=0, description="With 'logit_normal', shift towards high noise; 1 is none."
    )
