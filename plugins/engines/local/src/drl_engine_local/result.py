"""From a denoised batch to samples: trajectories by number, condition records, echo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from drl.api import ConditionRecord, Media, Sample, Trajectory
from drl_engine_local.schedule import Row, Schedule

if TYPE_CHECKING:
    from torch import Tensor

NOISE_FIELDS = ("sde_type", "noise_level", "log_prob_no_const")
Records = tuple[ConditionRecord, ConditionRecord | None]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all rows: ``(R, *L)`` latents, velocity, mean, noise; ``(R,)`` std, log-prob.

    On a deterministic step noise, std and log-prob are 0.
    """

    next_latents: Tensor
    velocity: Tensor
    mean: Tensor
    noise_std_B: Tensor
    noise: Tensor
    log_prob_B: Tensor

    def where(self, mask_B: Tensor, other: Step) -> Step:
        """Return this step in the rows of the mask, the other one elsewhere."""
        mask = mask_B.reshape(-1, *[1] * (self.mean.ndim - 1))
        return Step(
            next_latents=torch.where(mask, self.next_latents, other.next_latents),
            velocity=self.velocity,
            mean=torch.where(mask, self.mean, other.mean),
            noise_std_B=torch.where(mask_B, self.noise_std_B, other.noise_std_B),
            noise=torch.where(mask, self.noise, other.noise),
            log_prob_B=torch.where(mask_B, self.log_prob_B, other.log_prob_B),
        )


@dataclass(frozen=True, slots=True)
class Path:
    """A denoised batch: ``latents`` 0 to S, each ``(R, *L)``, and the steps between them."""

    stream: str
    schedule: Schedule
    latents: tuple[Tensor, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """A path on the CPU: ``latents`` ``(S + 1, R, *L)``, ``log_probs`` ``(S, R)``, float32."""

    stream: str
    latents: Tensor
    log_probs: Tensor
    sigmas: Tensor
    timesteps: Tensor
    debug: Mapping[str, Tensor]

    @classmethod
    def of(cls, path: Path, *, debug: bool) -> Record:
        """Copy a path to the CPU, once for the whole batch."""
        return cls(
            stream=path.stream,
            latents=_to_cpu(path.latents),
            log_probs=_to_cpu([step.log_prob_B for step in path.steps]),
            sigmas=path.schedule.sigmas.float().cpu(),
            timesteps=path.schedule.timesteps.float().cpu(),
            debug=_debug(path.steps) if debug else {},
        )

    def trajectory(self, row: Row, place: int) -> Trajectory:
        """Cut out one row; its tensors share no memory with those of other rows."""
        kept = row.kept_latents
        return Trajectory(
            latents={self.stream: self.latents[list(kept), place].clone()},
            latent_steps=kept,
            sigmas=self.sigmas.clone(),
            timesteps=self.timesteps.clone(),
            log_probs=self.log_probs[:, place].clone(),
            sde_steps=row.stochastic_steps,
            debug={name: tensor[:, place].clone() for name, tensor in self.debug.items()}
            if row.request.debug
            else {},
        )


def to_samples(
    rows: Sequence[Row],
    records: Sequence[Records],
    path: Path,
    media: Sequence[Media],
    *,
    version: int,
    seconds: float,
) -> list[Sample]:
    """Return one sample per row; ``seconds`` is the time of the batch that made it."""
    record = Record.of(path, debug=any(row.request.debug for row in rows))
    return [
        Sample(
            index=row.request.members[row.place],
            group_index=row.request.group_index,
            member=row.request.members[row.place],
            prompt=row.request.prompt,
            seed=row.request.seeds[row.place],
            path_seed=row.request.path_seeds[row.place] if row.request.path_seeds else None,
            media=media[place],
            trajectory=None if row.request.evaluation else record.trajectory(row, place),
            condition=records[place][0],
            negative=records[place][1],
            echo=_echo(row, record, media[place]),
            version=version,
            seconds=seconds,
        )
        for place, row in enumerate(rows)
    ]


def _echo(row: Row, record: Record, media: Media) -> dict[str, Any]:
    """Return the settings in use; what can be read off the result is read off it."""
    frames, height, width = media.pixels.shape[-3:]
    used = asdict(row.request.sampling)
    used.update(num_steps=len(record.sigmas) - 1, height=height, width=width, num_frames=frames)
    if row.request.evaluation:  # deterministic whatever the recipe's noise is: nothing to compare
        for name in NOISE_FIELDS:
            del used[name]
    return used


def _debug(steps: Sequence[Step]) -> dict[str, Tensor]:
    return {
        "model_outputs": _to_cpu([step.velocity for step in steps]),
        "prev_sample_means": _to_cpu([step.mean for step in steps]),
        "noise_std_devs": _to_cpu([step.noise_std_B for step in steps]),
        "variance_noises": _to_cpu([step.noise for step in steps]),
    }


def _to_cpu(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([*tensors]).float().cpu()
