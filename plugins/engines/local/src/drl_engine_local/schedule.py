"""What the rows of a batch share, and the checks of a request before it is queued."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from drl.api import BadInput, EngineError, Pipeline, RolloutRequest, Sampling, SdeBackend
from drl.mathematics.transfer import moved

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ODE = "ode"


@dataclass(frozen=True, slots=True)
class Row:
    """One sample to make: a request, and the place of the sample in it."""

    request: RolloutRequest
    place: int

    @property
    def key(self) -> Hashable:
        """Rows of equal keys can be denoised together; they differ in prompt, seed and steps only."""
        return replace(self.request.sampling, negative_prompt=None), self.request.evaluation

    @property
    def kind(self) -> str:
        """Which SDE backend makes its stochastic steps; evaluation is deterministic."""
        return ODE if self.request.evaluation else self.request.sampling.sde_type

    @property
    def stochastic_steps(self) -> tuple[int, ...]:
        """Return the numbers of its stochastic steps."""
        if self.kind == ODE:
            return ()
        every = tuple(range(self.request.sampling.num_steps))
        return every if self.request.sde_steps is None else self.request.sde_steps

    @property
    def kept_latents(self) -> tuple[int, ...]:
        """Return the numbers of the latents to return, 0 to S."""
        every = tuple(range(self.request.sampling.num_steps + 1))
        return every if self.request.kept_latents is None else self.request.kept_latents


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a batch: ``sigmas`` ``(S + 1,)`` and ``timesteps`` ``(S,)``, float32 on the CPU.

    ``sigmas_B``: per sigma its value for all rows, ``(R,)`` on the device; ``timesteps_B`` likewise.
    ``times``: the timesteps once more as numbers, so that routing never waits for the device.
    """

    sigmas: Tensor
    timesteps: Tensor
    sigmas_B: tuple[Tensor, ...]
    timesteps_B: tuple[Tensor, ...]
    times: tuple[float, ...]

    @classmethod
    def of(
        cls, pipeline: Pipeline, sampling: Sampling, count: int, device: torch.device
    ) -> Schedule:
        """Read both tables from the pipeline."""
        sigmas, timesteps = pipeline.sigmas(sampling), pipeline.timesteps(sampling)
        return cls(
            sigmas=sigmas.float().cpu(),
            timesteps=timesteps.float().cpu(),
            sigmas_B=_rows(sigmas, count, device),
            timesteps_B=_rows(timesteps, count, device),
            times=tuple(timesteps.tolist()),
        )


def _rows(values: Tensor, count: int, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(value.expand(count) for value in moved(values, device).unbind(0))


def check_request(request: RolloutRequest, backends: Mapping[str, SdeBackend]) -> None:
    """Refuse a request that could not be made as it asks; names the field."""
    _check_seeds(request)
    _check_numbers("sde_steps", request.sde_steps, request.sampling.num_steps - 1)
    _check_numbers("kept_latents", request.kept_latents, request.sampling.num_steps)
    kind = ODE if request.evaluation else request.sampling.sde_type
    missing = sorted({ODE, kind} - set(backends))
    if missing:
        raise EngineError(
            f"engine 'local' was started without the SDE backend {', '.join(missing)}; it has "
            f"{', '.join(sorted(backends))}. Launch it with every sde.type that requests may ask for"
        )
    if kind != ODE:
        _check_settings(request.sampling, backends[kind])


def _check_seeds(request: RolloutRequest) -> None:
    counts = {len(request.members), len(request.seeds)}
    if request.path_seeds is not None:
        counts.add(len(request.path_seeds))
    if len(counts) > 1 or not request.seeds:
        raise BadInput(
            f"a request needs one seed per member, got {len(request.seeds)} seeds for "
            f"{len(request.members)} members"
        )
    noises = [*zip(request.seeds, request.path_seeds or request.seeds, strict=True)]
    if len(set(noises)) < len(noises):
        raise BadInput(
            f"seeds {request.seeds} repeat: two samples of group {request.group_index} would be the "
            "same picture; give each its own seed or path seed"
        )


def _check_numbers(name: str, numbers: tuple[int, ...] | None, last: int) -> None:
    wrong = [number for number in numbers or () if not 0 <= number <= last]
    if wrong:
        raise BadInput(f"{name} has {wrong}; allowed are 0 to {last}")


def _check_settings(sampling: Sampling, backend: SdeBackend) -> None:
    held = backend_settings(backend)
    asked = {name: value for name, value in asdict(sampling).items() if name in held}
    wrong = [
        f"sde.{name}: asked {asked[name]}, held {held[name]}"
        for name in held
        if asked[name] != held[name]
    ]
    if wrong:
        raise EngineError(
            f"the request and the SDE backend of engine 'local' differ ({'; '.join(wrong)}); start the "
            "engine with backends of the recipe that makes the requests"
        )


def backend_settings(backend: SdeBackend) -> dict[str, Any]:
    """Return the settings that a backend works with, by their names in ``Sampling``."""
    section: Any = backend.context.section
    return {
        "noise_level": section.noise_level,
        "log_prob_no_const": section.log_prob_no_const,
    }
