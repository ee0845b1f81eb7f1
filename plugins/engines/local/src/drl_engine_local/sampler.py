"""Denoising a batch of a fixed number of rows, and turning it into samples.

Axes: ``R`` rows of the batch (always the same number), ``S`` steps, ``*L`` latent axes. All rows go
through one forward per step; whether a step is stochastic is each row's own affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from drl.api import (
    Condition,
    ConditionRecord,
    EngineError,
    Family,
    Guidance,
    Pipeline,
    Sample,
    Sampling,
    SdeBackend,
)
from drl.mathematics.gaussian import draw
from drl_engine_local.noise import RowNoise
from drl_engine_local.result import Path, Step, to_samples
from drl_engine_local.schedule import ODE, Row, Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn

NEGATIVE_PROMPT = " "
"""What guidance leads away from when a request names nothing; sglang servers use the same."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows that are denoised together; the last row is repeated up to the fixed count.

    ``stochastic``: per step, the rows whose step is stochastic, ``(R,)`` bool on the device, or None
    for a step that is deterministic in all rows. ``every``: per step, whether all rows are stochastic.
    """

    rows: tuple[Row, ...]
    sampling: Sampling
    schedule: Schedule
    noises: tuple[RowNoise, ...]
    positive: Condition
    negative: Condition | None
    stochastic: tuple[Tensor | None, ...]
    every: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Everything that denoising needs; ``models`` by component, ``backends`` by ``sde.type``."""

    family: Family
    pipeline: Pipeline
    models: Mapping[str, nn.Module]
    backends: Mapping[str, SdeBackend]
    count: int
    device: str
    dtype: str

    @property
    def stream(self) -> str:
        """Name of the one stream that is sampled."""
        return self.family.streams[0]

    @torch.no_grad()  # not inference_mode: the trainer puts these latents through its own forward
    def make(self, rows: Sequence[Row], *, version: int) -> list[Sample]:
        """Make the samples of up to ``count`` rows with equal keys, in their order."""
        start = perf_counter()
        records = [self._records(row) for row in rows]
        path = self._denoise(self._batch(rows, records))
        media = self.pipeline.decode({self.stream: path.latents[-1][: len(rows)]})
        return to_samples(
            rows, records, path, media, version=version, seconds=perf_counter() - start
        )

    def _records(self, row: Row) -> tuple[ConditionRecord, ConditionRecord | None]:
        sampling = row.request.sampling
        positive = self.pipeline.encode_text([row.request.prompt.text])[0]
        if not sampling.guided:
            return positive, None
        text = sampling.negative_prompt
        return positive, self.pipeline.encode_text([NEGATIVE_PROMPT if text is None else text])[0]

    def _batch(
        self,
        rows: Sequence[Row],
        records: Sequence[tuple[ConditionRecord, ConditionRecord | None]],
    ) -> Batch:
        filler = self.count - len(rows)
        sampling = rows[0].request.sampling
        filled = [*rows, *[rows[-1]] * filler]
        masks = [
            [step in row.stochastic_steps for row in filled] for step in range(sampling.num_steps)
        ]
        negatives = [negative for _, negative in records if negative is not None]
        return Batch(
            rows=tuple(rows),
            sampling=sampling,
            schedule=Schedule.of(self.pipeline, sampling, self.device),
            noises=tuple(self._noise(row) for row in rows),
            positive=self._collate([positive for positive, _ in records]),
            negative=self._collate(negatives) if negatives else None,
            stochastic=tuple(
                torch.tensor(mask, device=self.device) if any(mask) else None for mask in masks
            ),
            every=tuple(all(mask) for mask in masks),
        )

    def _noise(self, row: Row) -> RowNoise:
        path_seeds = row.request.path_seeds
        return RowNoise(
            self.pipeline,
            row.request.sampling,
            seed=row.request.seeds[row.place],
            path_seed=None if path_seeds is None else path_seeds[row.place],
            stream=self.stream,
            device=self.device,
        )

    def _collate(self, records: Sequence[ConditionRecord]) -> Condition:
        conditions = [self.family.condition(record) for record in records]
        conditions += [conditions[-1]] * (self.count - len(conditions))
        joined = self.family.collate(conditions)
        moved = {
            name: value.to(self.device) if isinstance(value, torch.Tensor) else value
            for name, value in joined.arguments.items()
        }
        return Condition(arguments=moved, rows=joined.rows)

    def _fill(self, rows: Sequence[Tensor]) -> Tensor:
        """Stack the rows of a batch, ``(R, *L)``, the last one repeated up to the fixed count."""
        return torch.stack([*rows, *[rows[-1]] * (self.count - len(rows))])

    def _denoise(self, batch: Batch) -> Path:
        latents = [self._fill([noise.initial for noise in batch.noises])]
        steps: list[Step] = []
        for number in range(batch.sampling.num_steps):
            velocity = self._velocity(batch, latents[-1], number)
            step = self._step(batch, latents[-1], velocity, number)
            steps.append(step)
            latents.append(step.next_latents)
        return Path(self.stream, batch.schedule, tuple(latents), tuple(steps))

    def _velocity(self, batch: Batch, latents: Tensor, number: int) -> Tensor:
        """Return the guided prediction ``(R, *L)`` in the model's output dtype."""
        sigma_B = batch.schedule.sigmas[number].expand(self.count)
        timestep_B = batch.schedule.timesteps[number].expand(self.count)
        time_B = self.family.model_time(sigma_B, timestep_B)
        route = self.family.route(batch.schedule.times[number])
        model = self._model(route.component)
        streams = {self.stream: latents}
        lower = self.dtype != "fp32"
        with torch.autocast(torch.device(self.device).type, DTYPES[self.dtype], enabled=lower):
            positive = self.family.forward(model, streams, time_B, batch.positive)
            if batch.negative is None:
                return positive[self.stream]
            negative = self.family.forward(model, streams, time_B, batch.negative)
        guidance = _guidance(batch.sampling, route.guidance_option)
        return self.family.guide(positive, negative, guidance)[self.stream]

    def _model(self, component: str) -> nn.Module:
        if component not in self.models:
            raise EngineError(
                f"the model needs its component {component!r} at this timestep, but engine 'local' "
                f"was started with {', '.join(self.models)}; add it to model.components"
            )
        return self.models[component]

    def _step(self, batch: Batch, latents: Tensor, velocity: Tensor, number: int) -> Step:
        mask = batch.stochastic[number]
        plain = None
        if not batch.every[number]:
            plain = self._plain_step(batch, latents, velocity, number)
        if mask is None:
            assert plain is not None
            return plain
        noisy = self._noisy_step(batch, latents, velocity, number)
        return noisy if plain is None else noisy.where(mask, plain)

    def _plain_step(self, batch: Batch, latents: Tensor, velocity: Tensor, number: int) -> Step:
        transition = self.backends[ODE].transition(
            latents, velocity, *self._sigmas(batch, number), sigma_max_B=self._sigma_max(batch)
        )
        following = rounded(transition.mean, velocity)
        zero_B = torch.zeros_like(transition.noise_std)
        return Step(
            following, velocity, transition.mean, zero_B, torch.zeros_like(following), zero_B
        )

    def _noisy_step(self, batch: Batch, latents: Tensor, velocity: Tensor, number: int) -> Step:
        backend = self.backends[batch.rows[0].kind]
        transition = backend.transition(
            latents, velocity, *self._sigmas(batch, number), sigma_max_B=self._sigma_max(batch)
        )
        noise = self._step_noise(batch, number)
        following = rounded(draw(transition.mean, transition.noise_std, noise), velocity)
        # From the latents that are kept, not from the noise: the trainer has nothing else, and with
        # the same function on the same numbers the ratio of the first update is exactly 1.
        log_prob_B = backend.log_prob(following, transition)
        return Step(following, velocity, transition.mean, transition.noise_std, noise, log_prob_B)

    def _step_noise(self, batch: Batch, number: int) -> Tensor:
        """Draw for the stochastic rows only; the generators of the others stand still."""
        return self._fill(
            [
                noise.draw() if number in row.stochastic_steps else torch.zeros_like(noise.initial)
                for row, noise in zip(batch.rows, batch.noises, strict=True)
            ]
        )

    def _sigmas(self, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
        sigmas = batch.schedule.sigmas
        return sigmas[number].expand(self.count), sigmas[number + 1].expand(self.count)

    def _sigma_max(self, batch: Batch) -> Tensor:
        return batch.schedule.sigmas[1].expand(self.count)


def rounded(following: Tensor, velocity: Tensor) -> Tensor:
    """Round the next latents to the model's output dtype, as the sglang scheduler does; float32 out."""
    return following.to(velocity.dtype).float()


def _guidance(sampling: Sampling, option: str) -> Guidance:
    scales = {
        "guidance_scale": sampling.guidance_scale,
        "guidance_scale_2": sampling.guidance_scale_2,
    }
    scale = scales.get(option)
    if scale is None:
        raise EngineError(f"the model wants sampling.{option} at this timestep, but it is not set")
    return Guidance(scale=scale, true_scale=sampling.true_cfg_scale)
