"""What of a rollout is trained: final latents, noise levels (rl-post-training reference 4.2)."""

from __future__ import annotations

from torch import Tensor

from drl.api import ContractError, Sample, Streams
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


def final_latents(sample: Sample) -> tuple[Streams, Tensor]:
    """Return final latents and sigma table of a sample; ContractError names what is missing."""
    trajectory = sample.trajectory
    if trajectory is None or sample.condition is None:
        missing = "trajectory" if trajectory is None else "condition"
        raise ContractError(f"sample {sample.index} lacks its {missing}; the engine must return it")
    last = trajectory.sigmas.shape[0] - 1
    if last not in trajectory.latent_steps:
        raise ContractError(
            f"sample {sample.index} lacks its final latents, number {last}; it has "
            f"{trajectory.latent_steps}: set sde.step_strategy = 'ode_and_return_last'"
        )
    return trajectory.at(last), trajectory.sigmas
