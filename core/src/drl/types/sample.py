"""From prompt to scored sample: what engines make and rewards see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drl.components import EMPTY
from drl.types.stream import Streams

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One decoded item. ``pixels``: ``(C, F, H, W)`` float32 in [0, 1] on the CPU; images have F = 1."""

    pixels: Tensor
    kind: str = "image"
    fps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFile:
    """An image or video of a data set, not decoded yet.

    ``root``: folder of the data set; ``name``: the file's place in it, or an absolute path. ``content``:
    its bytes where it lies inside a larger file; ``version`` then tells one content from another, and is
    otherwise size and time of the file. ``kind``: "image" or "video".
    """

    root: Path
    name: str
    kind: str = "image"
    content: bytes | None = None
    version: str | None = None

    @property
    def path(self) -> Path:
        """Where the file lies, or would lie."""
        return self.root / self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data source.

    ``row`` identifies the row (the text may repeat), ``epoch`` counts passes over the data, ``media``
    is set by sources for supervised training, and ``rejected`` is what it was preferred to.
    """

    row: int
    text: str
    epoch: int = 0
    metadata: Mapping[str, Any] = EMPTY
    media: Media | MediaFile | None = None
    rejected: Media | MediaFile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionRecord:
    """What a model is conditioned on, for one sample, as an engine reports it.

    ``tensors`` by the engine's field name (``encoder_hidden_states``, ``pooled_projections`` …),
    without a batch axis, on the CPU or the device of the encoders; ``values`` whatever is not a tensor.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Forward arguments of ``rows`` samples. Made by ``Family.condition`` and ``Family.collate``."""

    arguments: Mapping[str, Any]
    rows: int = 1


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Conditions:
    """Both conditions of guidance. Made by ``Family.conditions``, read by ``Family.predict``.

    ``negative`` is None for a forward without guidance. ``joint``: the rows of ``positive``, then those of
    ``negative``, where both predictions share one forward.
    """

    positive: Condition
    negative: Condition | None = None
    joint: Condition | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of one generation; compared field by field with what an engine echoes."""

    num_steps: int
    height: int
    width: int
    num_frames: int = 1
    fps: float | None = None
    flow_shift: float | None = None
    guidance_scale: float = 1.0
    guidance_scale_2: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    sde_type: str = "ode"
    noise_level: float = 0.0
    log_prob_no_const: bool = False
    generator_device: str = "cpu"

    @property
    def guided(self) -> bool:
        """True when classifier-free guidance is on (a scale above 1, true scale wins)."""
        if self.true_cfg_scale is not None:
            return self.true_cfg_scale > 1.0
        return max(self.guidance_scale, self.guidance_scale_2 or 0.0) > 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One microgroup: some samples of one prompt.

    ``seeds``: one integer per sample. ``path_seeds``: when set, sample i draws its initial latents
    from ``seeds[i]`` and its step noise from ``path_seeds[i]``, so that a group can share its start.
    ``sde_steps``: stochastic step numbers, ``None`` = all. ``kept_latents``: latent numbers 0..S to
    return, ``None`` = all, ``()`` = none. ``evaluation``: plain deterministic sampling, no trajectory.
    """

    prompt: Prompt
    group_index: int
    members: tuple[int, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    path_seeds: tuple[int, ...] | None = None
    sde_steps: tuple[int, ...] | None = None
    kept_latents: tuple[int, ...] | None = None
    evaluation: bool = False
    debug: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The denoising path of one sample, float32; on the CPU but for ``latents`` and ``debug``.

    These two may lie on the engine's device: whatever leaves the process, or is looked at there, moves them.
    ``latents``: per stream ``(R, *L)``, the latents whose numbers are ``latent_steps`` (0..S).
    ``sigmas``: ``(S + 1,)``, the table in use, after shift, ending in 0. ``timesteps``: ``(S,)``.
    ``log_probs``: ``(S,)``, 0 on deterministic steps. ``sde_steps``: the stochastic step numbers.
    ``debug``: per-step tensors of the engine, where a request asks for them: ``model_outputs``,
    ``prev_sample_means``, ``variance_noises`` ``(S, *L)`` and ``noise_std_devs`` ``(S,)``.
    """

    latents: Streams
    latent_steps: tuple[int, ...]
    sigmas: Tensor
    timesteps: Tensor
    log_probs: Tensor
    sde_steps: tuple[int, ...]
    debug: Streams = EMPTY

    def at(self, number: int) -> dict[str, Tensor]:
        """Return latents by number, never by position in the array; KeyError names the missing one."""
        if number not in self.latent_steps:
            raise KeyError(f"trajectory lacks latents {number}; it has {self.latent_steps}")
        place = self.latent_steps.index(number)
        return {name: tensor[place] for name, tensor in self.latents.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Output of one reward for one sample. ``value`` is None when it failed, ``failure`` says why."""

    value: float | None
    parts: Mapping[str, float] = EMPTY
    failure: str | None = None


@dataclass(slots=True, kw_only=True)
class Sample:
    """One trajectory with its seed. Mutable, because scores and ``removed`` arrive later.

    ``index`` and ``group_index`` count monotonically over the run. ``echo`` holds the settings that
    the engine says it used (only the fields it can echo); ``version`` the weights that made it.
    ``clean``: encoded latents of a supervised sample, per stream ``(*L)``; of a preference those of the
    worse one too, under ``rejected(stream)``.
    """

    index: int
    group_index: int
    member: int
    prompt: Prompt
    seed: int
    path_seed: int | None = None
    media: Media | None = None
    trajectory: Trajectory | None = None
    clean: Streams | None = None
    condition: ConditionRecord | None = None
    negative: ConditionRecord | None = None
    echo: Mapping[str, Any] = EMPTY
    version: int = 0
    seconds: float = 0.0
    scores: Mapping[str, Score] = EMPTY
    reward: float | None = None
    removed: bool = False

    @property
    def remove_sample(self) -> bool:
        """Another name of ``removed``."""
        return self.removed

    @remove_sample.setter
    def remove_sample(self, value: bool) -> None:
        self.removed = value


@dataclass(slots=True, kw_only=True)
class Group:
    """The samples of one prompt draw, ordered by member."""

    group_index: int
    prompt: Prompt
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that is not trained on; ``reason`` is counted in ``rollout/dynamic_filter/drop_<reason>``."""

    reason: str


@dataclass(slots=True, kw_only=True)
class Rollout:
    """All kept groups of one iteration, sorted by ``group_index``, with what collecting them cost.

    ``metrics``: figures for the iteration's row, by full name. ``logged``: False leaves drl's own figures
    of the rollout out of the log. ``seconds``: by kind of work ("generate", "reward"); ``spans``: when it
    was done, begin and end in seconds of ``time.perf_counter``.
    """

    rollout_id: int
    version: int
    groups: list[Group]
    dropped: Mapping[str, int] = EMPTY
    seconds: Mapping[str, float] = EMPTY
    spans: Mapping[str, Sequence[tuple[float, float]]] = EMPTY
    metrics: Mapping[str, float] = EMPTY
    logged: bool = True

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group.samples]
