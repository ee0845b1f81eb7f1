"""From a denoised batch to samples: trajectories by number, condition records, echo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from drl.api import ConditionRecord, Media, Sample, Trajectory
from drl_engine_local.schedule import Row, Schedule
from drl_engine_local.transfer import Download

if TYPE_CHECKING:
    from torch import Tensor

NOISE_FIELDS = ("sde_type", "noise_level", "log_prob_no_const")
LOG_PROBS = "log_probs"
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
    """What is kept of a denoised batch, on the device.

    ``latents``: by number, 0 to S, ``(R, *L)``, those that any row keeps. ``last``: the clean ones.
    ``log_probs``: ``(S, R)``. ``steps``: all of them where a row wants debug tensors, else none.
    """

    stream: str
    schedule: Schedule
    latents: Mapping[int, Tensor]
    last: Tensor
    log_probs: Tensor
    steps: tuple[Step, ...]

    def trajectory(self, row: Row, place: int) -> Trajectory:
        """Cut out one row; its tensors share no memory with those of other rows.

        ``log_probs`` are the device's own, to be replaced by their copy.
        """
        return Trajectory(
            latents={self.stream: self._kept(row.kept_latents, place)},
            latent_steps=row.kept_latents,
            sigmas=self.schedule.sigmas.clone(),
            timesteps=self.schedule.timesteps.clone(),
            log_probs=self.log_probs[:, place],
            sde_steps=row.stochastic_steps,
            debug=self._debug(place) if row.request.debug else {},
        )

    def _kept(self, numbers: Sequence[int], place: int) -> Tensor:
        if not numbers:
            return self.last.new_empty((0, *self.last.shape[1:]))
        return torch.stack([self.latents[number][place] for number in numbers])

    def _debug(self, place: int) -> dict[str, Tensor]:
        columns = {
            "model_outputs": [step.velocity[place] for step in self.steps],
            "prev_sample_means": [step.mean[place] for step in self.steps],
            "noise_std_devs": [step.noise_std_B[place] for step in self.steps],
            "variance_noises": [step.noise[place] for step in self.steps],
        }
        return {name: torch.stack(column).float() for name, column in columns.items()}


class Launched:
    """A batch whose work is queued on the device; its samples are whole once that is done."""

    def __init__(
        self,
        rows: Sequence[Row],
        records: Sequence[Records],
        path: Path,
        media: Sequence[Media],
        *,
        version: int,
        start: float,
    ) -> None:
        self.rows = rows
        self.records = records
        self.schedule = path.schedule
        self.media = media
        self.version = version
        self.start = start
        # here, on the engine's thread: behind this batch, and before the next one, in the device's order
        self.trajectories = [
            None if row.request.evaluation else path.trajectory(row, place)
            for place, row in enumerate(rows)
        ]
        pictures = {str(place): item.pixels for place, item in enumerate(media)}
        self.copies = Download({**pictures, LOG_PROBS: path.log_probs})

    def samples(self, *, since: float = 0.0) -> list[Sample]:
        """Wait for the device, and return one sample per row.

        ``since``: when the batch before it was done, by ``perf_counter``; the time of this one counts from
        then on.
        """
        arrived = self.copies.wait()
        seconds = perf_counter() - max(self.start, since)
        return [self._sample(place, arrived, seconds) for place in range(len(self.rows))]

    def _sample(self, place: int, arrived: Mapping[str, Tensor], seconds: float) -> Sample:
        row, path = self.rows[place], self.trajectories[place]
        request = row.request
        positive, negative = self.records[place]
        media = replace(self.media[place], pixels=arrived[str(place)])
        if path is not None:
            path = replace(path, log_probs=arrived[LOG_PROBS][:, place].clone())
        return Sample(
            index=request.members[row.place],
            group_index=request.group_index,
            member=request.members[row.place],
            prompt=request.prompt,
            seed=request.seeds[row.place],
            path_seed=request.path_seeds[row.place] if request.path_seeds else None,
            media=media,
            trajectory=path,
            condition=positive,
            negative=negative,
            echo=_echo(row, self.schedule, media),
            version=self.version,
            seconds=seconds,
        )


def _echo(row: Row, schedule: Schedule, media: Media) -> dict[str, Any]:
    """Return the settings in use; what can be read off the result is read off it."""
    frames, height, width = media.pixels.shape[-3:]
    used = asdict(row.request.sampling)
    used.update(num_steps=len(schedule.timesteps), height=height, width=width, num_frames=frames)
    if row.request.evaluation:  # deterministic whatever the recipe's noise is: nothing to compare
        for name in NOISE_FIELDS:
            del used[name]
    return used
