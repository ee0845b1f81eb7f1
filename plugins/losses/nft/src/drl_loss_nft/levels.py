"""Which noise levels are trained (rl-post-training reference 4.2)."""

from __future__ import annotations

from torch import Tensor

from drl.api import ContractError
from drl.mathematics.steps import share_of_steps

ZERO = 1e-8
"""A last sigma within this of 0 is no noise level."""


def trained_levels(sigmas: Tensor, fraction: float) -> list[float]:
    """Return the sigmas, largest first, without the final 0 and without the lowest beyond ``fraction``."""
    levels: list[float] = sigmas.tolist()
    if len(levels) > 1 and abs(levels[-1]) < ZERO:
        del levels[-1]
    if not levels:
        raise ContractError(
            "a sample's sigma table is empty; the engine must return the one it used"
        )
    return levels[: share_of_steps(len(levels), fraction)]
