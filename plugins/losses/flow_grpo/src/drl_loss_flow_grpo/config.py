"""Options of ``policy_loss``: the table ``[algorithm.policy_loss]``."""

from __future__ import annotations

from drl.options import Field, Options


class PolicyLossConfig(Options):
    """Clipped policy gradient on the log-probability of denoising steps (Flow-GRPO)."""

    clip_range: float = Field(
        1e-4,
        gt=0,
        lt=1,
        description="The ratio of new to old probability is clipped to 1 plus or minus this.",
    )
    recompute_old_log_prob: bool = Field(
        False,
        description="Old log-probabilities are the trainer's own, from before the rollout's first step.",
    )
