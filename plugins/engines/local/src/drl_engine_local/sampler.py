"""Denoising a batch of a fixed number of rows, and turning it into samples.

Axes: ``R`` rows of the batch (always the same number), ``S`` steps, ``*L`` latent axes. All rows go
through one forward per step; whether a step is stochastic is each row's own affair. Nothing in here
waits for the device: what the loop needs lies there before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from drl.api import (
    Condition,
    ConditionRecord,
    Conditions,
    EngineError,
    Family,
    Guidance,
    Pipeline,
    Sample,
    Sampling,
    SdeBackend,
    Streams,
)
from drl.mathematics.feeding import DTYPES, Feeding, guidance_by_option, routed
from drl.mathematics.gaussian import draw
from drl.mathematics.transfer import moved
from drl_engine_local.graphs import ForwardGraphs
from drl_engine_local.noise import BatchNoise, RowNoise
from drl_engine_local.result import Launched, Path, Records, Step
from drl_engine_local.schedule import ODE, Row, Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn

NEGATIVE_PROMPT = " "
"""What guidance leads away from when a request names nothing; sglang servers use the same."""


SCHEDULES = 16
"""Schedules that are kept; a run has one for training and one for each kind of evaluation."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows that are denoised together; the last row is repeated up to the fixed count.

    ``stochastic``: per step and row, whether the step is stochastic. ``masks``: the same as ``(S, R)`` bool
    on the device, where a step differs between rows.
    """

    rows: tuple[Row, ...]
    sampling: Sampling
    schedule: Schedule
    noise: BatchNoise
    conditions: Conditions
    stochastic: tuple[tuple[bool, ...], ...]
    masks: Tensor | None

    @property
    def kept(self) -> frozenset[int]:
        """Numbers of the latents that any row wants back."""
        return frozenset(
            number for row in self.rows if not row.request.evaluation for number in row.kept_latents
        )

    @property
    def debug(self) -> bool:
        """Whether any row wants the tensors of each step back."""
        return any(row.request.debug for row in self.rows)


@dataclass
class Fill:
    """How the forwards were filled: ``rows`` of requests, and ``filler`` rows that cost as much."""

    rows: int = 0
    filler: int = 0


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Everything that denoising needs; ``models`` by component, ``backends`` by ``sde.type``.

    ``batched_guidance``: both predictions of guidance in one forward. ``feeding``: by component, where the
    family has wishes. ``graphs``: replays the forwards as CUDA graphs, when set.
    """

    family: Family
    pipeline: Pipeline
    models: Mapping[str, nn.Module]
    backends: Mapping[str, SdeBackend]
    count: int
    device: str
    dtype: str
    batched_guidance: bool = False
    feeding: Mapping[str, Feeding] = field(default_factory=dict)
    graphs: ForwardGraphs | None = None
    fill: Fill = field(default_factory=Fill)
    schedules: dict[Sampling, Schedule] = field(default_factory=dict)

    @property
    def stream(self) -> str:
        """Name of the one stream that is sampled."""
        return self.family.streams[0]

    @property
    def place(self) -> torch.device:
        """The device of the models."""
        return torch.device(self.device)

    def counts(self) -> dict[str, float]:
        """Return how many rows the batches had, those that only filled them up, and graphs recorded."""
        fill = self.fill
        figures = {"rows": float(fill.rows + fill.filler), "filler_rows": float(fill.filler)}
        if self.graphs is not None:
            figures["recorded_graphs"] = float(self.graphs.recorded)
        return figures

    def make(self, rows: Sequence[Row], *, version: int) -> list[Sample]:
        """Make the samples of up to ``count`` rows with equal keys, in their order."""
        return self.launch(rows, version=version).samples()

    @torch.no_grad()  # not inference_mode: the trainer puts these latents through its own forward
    def launch(self, rows: Sequence[Row], *, version: int) -> Launched:
        """Queue all work of up to ``count`` rows on the device; on a CPU it is done on return."""
        start = perf_counter()
        records = [self._records(row) for row in rows]
        path = self.denoise(self.batch(rows, records))
        media = self.pipeline.decode({self.stream: path.last[: len(rows)]})
        self.fill.rows += len(rows)
        self.fill.filler += self.count - len(rows)
        return Launched(rows, records, path, media, version=version, start=start)

    def _records(self, row: Row) -> Records:
        sampling = row.request.sampling
        positive = self.pipeline.encode_text([row.request.prompt.text])[0]
        if not sampling.guided:
            return positive, None
        text = sampling.negative_prompt
        return positive, self.pipeline.encode_text([NEGATIVE_PROMPT if text is None else text])[0]

    def batch(self, rows: Sequence[Row], records: Sequence[Records]) -> Batch:
        """Bring everything that the steps of these rows need to the device."""
        sampling = rows[0].request.sampling
        filled = [*rows, *[rows[-1]] * (self.count - len(rows))]
        stochastic = tuple(
            tuple(step in row.stochastic_steps for row in filled)
            for step in range(sampling.num_steps)
        )
        mixed = any(any(step) and not all(step) for step in stochastic)
        return Batch(
            rows=tuple(rows),
            sampling=sampling,
            schedule=self._schedule(sampling),
            noise=BatchNoise([self._noise(row) for row in rows], self.count, self.place),
            conditions=self._conditions(records),
            stochastic=stochastic,
            masks=moved(torch.tensor(stochastic), self.place) if mixed else None,
        )

    def _schedule(self, sampling: Sampling) -> Schedule:
        key = replace(sampling, negative_prompt=None)
        if key not in self.schedules:
            if len(self.schedules) >= SCHEDULES:
                self.schedules.clear()
            self.schedules[key] = Schedule.of(self.pipeline, sampling, self.count, self.place)
        return self.schedules[key]

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

    def _conditions(self, records: Sequence[Records]) -> Conditions:
        negatives = [negative for _, negative in records if negative is not None]
        return self.family.conditions(
            self._collate([positive for positive, _ in records]),
            self._collate(negatives) if negatives else None,
            batched=self.batched_guidance,
        )

    def _collate(self, records: Sequence[ConditionRecord]) -> Condition:
        """Join the conditions of all rows; a record that several rows share is moved once."""
        here = {id(record): self._on_device(record) for record in records}
        conditions = [self.family.condition(here[id(record)]) for record in records]
        return self.family.collate([*conditions, *conditions[-1:] * (self.count - len(records))])

    def _on_device(self, record: ConditionRecord) -> ConditionRecord:
        tensors = {name: moved(tensor, self.place) for name, tensor in record.tensors.items()}
        return replace(record, tensors=tensors)

    def denoise(self, batch: Batch) -> Path:
        """Run all steps; the host waits for the device in none of them."""
        latents = batch.noise.initial()
        kept = {0: latents} if 0 in batch.kept else {}
        steps: list[Step] = []
        log_probs: list[Tensor] = []
        for number in range(batch.sampling.num_steps):
            velocity = self._velocity(batch, latents, number)
            step = self._step(batch, latents, velocity, number)
            latents = step.next_latents
            log_probs.append(step.log_prob_B)
            if number + 1 in batch.kept:
                kept[number + 1] = latents
            if batch.debug:
                steps.append(step)
        return Path(
            self.stream, batch.schedule, kept, latents, torch.stack(log_probs), tuple(steps)
        )

    def _velocity(self, batch: Batch, latents: Tensor, number: int) -> Tensor:
        """Return the guided prediction ``(R, *L)`` in the model's output dtype."""
        schedule = batch.schedule
        time_B = self.family.model_time(schedule.sigmas_B[number], schedule.timesteps_B[number])
        route = self.family.route(schedule.times[number])
        guidance = routed(
            guidance_by_option(batch.sampling), route.guidance_option, self._fed(route.component)
        )
        predict = (
            self.predict if self.graphs is None else partial(self.graphs.predict, self.predict)
        )
        velocity = predict(
            route.component, {self.stream: latents}, time_B, batch.conditions, guidance=guidance
        )
        return velocity[self.stream]

    def predict(
        self,
        component: str,
        streams: Streams,
        time_B: Tensor,
        conditions: Conditions,
        guidance: Guidance,
    ) -> Streams:
        """Return the guided velocity of one component, kernel by kernel."""
        model = self._model(component)
        lower = self.dtype != "fp32"
        # no cache of rounded weights: it would outlive an update inside a CUDA graph
        with torch.autocast(
            self.place.type, DTYPES[self.dtype], enabled=lower, cache_enabled=False
        ):
            streams, fed_B, conditions = self._fed(component).cast(
                DTYPES[self.dtype], streams, time_B, conditions
            )
            return self.family.predict(model, streams, fed_B, conditions, guidance)

    def _fed(self, component: str) -> Feeding:
        return self.feeding.get(component, Feeding())

    def _model(self, component: str) -> nn.Module:
        if component not in self.models:
            raise EngineError(
                f"the model needs its component {component!r} at this timestep, but engine 'local' "
                f"was started with {', '.join(self.models)}; add it to model.components"
            )
        return self.models[component]

    def _step(self, batch: Batch, latents: Tensor, velocity: Tensor, number: int) -> Step:
        stochastic = batch.stochastic[number]
        if all(stochastic):
            return self._noisy_step(batch, latents, velocity, number)
        plain = self._plain_step(batch, latents, velocity, number)
        if not any(stochastic):
            return plain
        assert batch.masks is not None
        noisy = self._noisy_step(batch, latents, velocity, number)
        return noisy.where(batch.masks[number], plain)

    def _plain_step(self, batch: Batch, latents: Tensor, velocity: Tensor, number: int) -> Step:
        sigmas_B = batch.schedule.sigmas_B
        transition = self.backends[ODE].transition(
            latents, velocity, sigmas_B[number], sigmas_B[number + 1], sigma_max_B=sigmas_B[1]
        )
        following = rounded(transition.mean, velocity)
        zero_B = torch.zeros_like(transition.noise_std)
        return Step(
            following, velocity, transition.mean, zero_B, torch.zeros_like(following), zero_B
        )

    def _noisy_step(self, batch: Batch, latents: Tensor, velocity: Tensor, number: int) -> Step:
        backend = self.backends[batch.rows[0].kind]
        sigmas_B = batch.schedule.sigmas_B
        transition = backend.transition(
            latents, velocity, sigmas_B[number], sigmas_B[number + 1], sigma_max_B=sigmas_B[1]
        )
        noise = batch.noise.draw(batch.stochastic[number])
        following = rounded(draw(transition.mean, transition.noise_std, noise), velocity)
        # From the latents that are kept, not from the noise: the trainer has nothing else, and with
        # the same function on the same numbers the ratio of the first update is exactly 1.
        log_prob_B = backend.log_prob(following, transition)
        return Step(following, velocity, transition.mean, transition.noise_std, noise, log_prob_B)


def rounded(following: Tensor, velocity: Tensor) -> Tensor:
    """Round the next latents to the model's output dtype, as the sglang scheduler does; float32 out."""
    return following.to(velocity.dtype).float()
