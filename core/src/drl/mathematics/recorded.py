"""Recorded trajectories to training rows: a pair per stochastic step, or the final latents alone."""

from __future__ import annotations

import math

from torch import Tensor, equal

from drl.api import (
    ConditionRecord,
    ContractError,
    Pair,
    Sample,
    Streams,
    Trajectory,
    TrustError,
    successor,
)


def recorded_pairs(sample: Sample, advantage: float, sigmas: Tensor | None) -> list[Pair]:
    """Return the pairs of a sample, in the order of its steps.

    ``sigmas``: the table ``(S + 1,)`` that the rollout shares, when known. Removed samples and samples
    without a reward weigh 0. Raises ContractError for a record that is missing, TrustError for one
    that cannot be right.
    """
    trajectory = _complete(sample, sigmas)
    weight = weight_of(sample)
    return [_pair(sample, trajectory, step, advantage, weight) for step in trajectory.sde_steps]


def weight_of(sample: Sample) -> float:
    """Return 1, and 0 for a sample that a filter took out or that has no reward."""
    return 0.0 if sample.removed or sample.reward is None else 1.0


def encoded(sample: Sample, trains_on: str) -> tuple[Streams, ConditionRecord]:
    """Return clean latents and condition of a record; ContractError ends with what the loss ``trains_on``."""
    if sample.clean is None or sample.condition is None:
        missing = "clean latents" if sample.clean is None else "its condition"
        raise ContractError(f"sample {sample.index} lacks {missing}; {trains_on}")
    return sample.clean, sample.condition


def final_latents(sample: Sample) -> tuple[Trajectory, Streams]:
    """Return the path of a sample and its last latents; ContractError names what is missing."""
    trajectory = sample.trajectory
    if trajectory is None or sample.condition is None:
        missing = "trajectory" if trajectory is None else "condition"
        raise ContractError(
            f"sample {sample.index} lacks its {missing}; the engine must return it with training "
            "requests"
        )
    last = trajectory.sigmas.shape[0] - 1
    if last not in trajectory.latent_steps:
        raise ContractError(
            f"sample {sample.index} lacks its final latents, number {last}; it has "
            f"{trajectory.latent_steps}: set sde.step_strategy = 'ode_and_return_last'"
        )
    return trajectory, trajectory.at(last)


def _pair(
    sample: Sample, trajectory: Trajectory, step: int, advantage: float, weight: float
) -> Pair:
    here, after = trajectory.at(step), trajectory.at(step + 1)
    log_prob_old = float(trajectory.log_probs[step])
    if weight > 0 and not math.isfinite(log_prob_old):
        raise TrustError(
            f"sample {sample.index}: the engine's log-prob of step {step} is {log_prob_old}; keep that "
            "step out of the stochastic steps, or set sde.log_prob_no_const = true for 'cps'"
        )
    return Pair(
        id=(sample.index, step),
        unit=sample.index,
        sigma=float(trajectory.sigmas[step]),
        timestep=float(trajectory.timesteps[step]),
        weight=weight,
        tensors=here | {successor(stream): latents for stream, latents in after.items()},
        condition=sample.condition,
        negative=sample.negative,
        values={
            "advantage": advantage if weight > 0 else 0.0,
            "log_prob_old": log_prob_old if weight > 0 else 0.0,
            "sigma_next": float(trajectory.sigmas[step + 1]),
            # of the rollout's own table: rebuilding it drifts by 2 ulp
            "sigma_max": float(trajectory.sigmas[1]),
            "step": float(step),
            "raw_reward": 0.0 if sample.reward is None else float(sample.reward),
        },
    )


def _complete(sample: Sample, sigmas: Tensor | None) -> Trajectory:
    trajectory = sample.trajectory
    if trajectory is None:
        raise ContractError(
            f"sample {sample.index} lacks its trajectory; the engine must return latents, sigmas and "
            "log-probs of training requests"
        )
    if sample.condition is None:
        raise ContractError(
            f"sample {sample.index} lacks its condition; the engine must return what the model was "
            "conditioned on"
        )
    if not trajectory.sde_steps:
        raise ContractError(
            f"sample {sample.index} carries no trained-step list; set sde.num_steps above 0 and a "
            "sde.step_strategy"
        )
    _check_steps(sample.index, trajectory)
    if sigmas is not None and not equal(trajectory.sigmas, sigmas):
        raise TrustError(
            f"sample {sample.index} was made with sigmas {_shown(trajectory.sigmas)}, the rollout with "
            f"{_shown(sigmas)}; the samples of a rollout must share one schedule"
        )
    return trajectory


def _check_steps(index: int, trajectory: Trajectory) -> None:
    num_steps = trajectory.timesteps.shape[0]
    if trajectory.sigmas.shape[0] != num_steps + 1 or trajectory.log_probs.shape != (num_steps,):
        raise ContractError(
            f"sample {index} has {num_steps} timesteps, {trajectory.sigmas.shape[0]} sigmas and "
            f"log-probs of shape {tuple(trajectory.log_probs.shape)}; {num_steps} steps need "
            f"{num_steps + 1} sigmas (the last is 0) and {num_steps} log-probs"
        )
    beyond = [step for step in trajectory.sde_steps if not 0 <= step < num_steps]
    if beyond:
        raise ContractError(
            f"sample {index} names stochastic steps {beyond}, but has steps 0 to {num_steps - 1}"
        )
    needed = sorted({number for step in trajectory.sde_steps for number in (step, step + 1)})
    missing = [number for number in needed if number not in trajectory.latent_steps]
    if missing:
        raise ContractError(
            f"sample {index} lacks latents {missing} for its trained steps {trajectory.sde_steps}; it "
            f"has {trajectory.latent_steps}: the step strategy must keep them and the engine return them"
        )


def _shown(sigmas: Tensor) -> str:
    return "[" + ", ".join(f"{float(sigma):.6g}" for sigma in sigmas) + "]"
