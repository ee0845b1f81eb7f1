"""The data that travels between stages: prompt, request, sample, pair and what is made of them.

Axes: ``P`` prompts, ``G`` samples per prompt, ``B`` rows, ``S`` denoising steps (a sigma table has
``S + 1`` entries and ends in 0), ``*L`` latent axes of whatever rank. This module imports no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from drl.components import EMPTY

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Generator, Tensor

    Streams = Mapping[str, Tensor]
else:
    Streams = Mapping

VISUAL = "visual"
"""Name of the image or video stream; a plain latent tensor is this stream."""


def successor(stream: str) -> str:
    """Key of the recorded next latents of a stream in ``Pair.tensors``."""
    return f"{stream}.next"


class Role(enum.StrEnum):
    """Which part of a run a component works in."""

    DRIVER = "driver"
    TRAIN = "train"
    ROLLOUT = "rollout"
    REWARD = "reward"


class Need(enum.StrEnum):
    """What a loss asks core to provide."""

    ROLLOUT = "rollout"
    OLD_LOG_PROB = "old_log_prob"
    TRANSITION = "transition"
    OLD_PREDICTION = "old_prediction"
    REFERENCE = "reference"
    GUIDANCE = "guidance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a component runs, and what it may know of the run.

    ``section`` holds core's own options of the recipe section that the component is chosen in
    (a loss sees ``recipe.algorithm``, an SDE backend ``recipe.sde``); it is frozen.
    """

    role: Role = Role.DRIVER
    rank: int = 0
    world: int = 1
    device: str = "cpu"
    dtype: str = "fp32"
    run_dir: Path | None = None
    seed: int = 0
    section: Any = None

    def generator(self, purpose: str, *ids: int) -> Generator:
        """Return a CPU generator that depends on run seed, purpose and ids, and on nothing else."""
        from drl.mathematics.seeding import generator

        return generator(self.seed, purpose, *ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext(Context):
    """``Context`` plus the optimizer window that a loss works in."""

    rollout_id: int = 0
    window: int = 0
    sigmas: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One decoded item. ``pixels``: ``(C, F, H, W)`` float32 in [0, 1] on the CPU; images have F = 1."""

    pixels: Tensor
    kind: str = "image"
    fps: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of a data source.

    ``row`` identifies the row (the text may repeat), ``epoch`` counts passes over the data, ``media``
    is set by sources for supervised training.
    """

    row: int
    text: str
    epoch: int = 0
    metadata: Mapping[str, Any] = EMPTY
    media: Media | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionRecord:
    """What a model is conditioned on, for one sample, as an engine reports it.

    ``tensors`` by the engine's field name (``encoder_hidden_states``, ``pooled_projections`` …),
    without a batch axis; ``values`` whatever is not a tensor.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any] = EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Forward arguments of ``rows`` samples. Made by ``Family.condition`` and ``Family.collate``."""

    arguments: Mapping[str, Any]
    rows: int = 1


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
        """True when classifier-free guidance is on (scale above 1, true scale wins)."""
        scale = self.true_cfg_scale if self.true_cfg_scale is not None else self.guidance_scale
        return scale > 1.0


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
    """The denoising path of one sample, float32 on the CPU.

    ``latents``: per stream ``(R, *L)``, the latents whose numbers are ``latent_steps`` (0..S).
    ``sigmas``: ``(S + 1,)``, the table in use, after shift, ending in 0. ``timesteps``: ``(S,)``.
    ``log_probs``: ``(S,)``, 0 on deterministic steps. ``sde_steps``: the stochastic step numbers.
    ``debug``: optional per-step tensors ``(S, *L)`` by name.
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
    ``clean``: encoded latents of a supervised sample, per stream ``(*L)``.
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
    """All kept groups of one iteration, sorted by ``group_index``, with what collecting them cost."""

    rollout_id: int
    version: int
    groups: list[Group]
    dropped: Mapping[str, int] = EMPTY
    seconds: Mapping[str, float] = EMPTY

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group."""
        return [sample for group in self.groups for sample in group.samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The training row that a loss's ``expand`` makes.

    ``id`` names its noise, its log line and its place (sample index, step number …). Pairs of one
    ``unit`` never part across optimizer windows. ``tensors``: per stream ``(*L)`` float32, and under
    ``successor(stream)`` the recorded next latents. ``weight`` multiplies the loss and enters the
    divisor; 0 marks filler, removed and failed samples. ``values``: scalars by name.
    """

    id: tuple[int, ...]
    unit: int
    sigma: float
    component: str = "transformer"
    timestep: float | None = None
    weight: float = 1.0
    tensors: Streams
    condition: ConditionRecord | None = None
    negative: ConditionRecord | None = None
    values: Mapping[str, float] = EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """A micro-batch of pairs on the training device.

    ``tensors``: per key ``(B, *L)`` float32. ``values``: per name ``(B,)`` float32. ``weight_B``,
    ``sigma_B``: ``(B,)`` float32. ``timestep_B``: ``(B,)`` float32 or None.
    """

    pairs: tuple[Pair, ...]
    tensors: Streams
    values: Mapping[str, Tensor]
    weight_B: Tensor
    sigma_B: Tensor
    timestep_B: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Classifier-free guidance of one forward: the scale of the route, the true scale, the joint form."""

    scale: float = 1.0
    true_scale: float | None = None
    joint: bool = False

    @property
    def effective(self) -> float:
        """The scale in force: the true scale when set."""
        return self.true_scale if self.true_scale is not None else self.scale

    @property
    def on(self) -> bool:
        """True when a negative branch must run."""
        return self.effective > 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """What a loss's ``prepare`` hands to core for one forward.

    ``streams``: per stream ``(B, *L)``; ``model_time_B``: ``(B,)`` as the model is fed, or None to
    let core derive it from sigma and timestep; ``extras``: what ``compute`` needs again.
    """

    streams: Streams
    model_time_B: Tensor | None = None
    condition: Condition | None = None
    negative: Condition | None = None
    guidance: Guidance = Guidance()
    extras: Streams = EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Model outputs after guidance, per stream ``(B, *L)``; ``old`` and ``reference`` on demand."""

    trained: Streams
    old: Streams | None = None
    reference: Streams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One stochastic step: ``mean`` ``(B, *L)``, ``noise_std`` ``(B,)``, ``std_dev_t`` ``(B,)``; float32."""

    mean: Tensor
    noise_std: Tensor
    std_dev_t: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTransition:
    """The recorded step under the trained weights, per stream.

    ``mean``: ``(B, *L)``; ``std_dev_t_B``, ``log_prob_B``: ``(B,)`` of the recorded next latents;
    ``reference_mean``: ``(B, *L)`` when a reference ran. All float32.
    """

    mean: Streams
    std_dev_t_B: Streams
    log_prob_B: Streams
    reference_mean: Streams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of a micro-batch. ``reduction``: "mean" (total / count) or "max" (total alone).

    ``total`` and ``count`` are detached scalars (tensors stay on the device until the step ends).
    """

    total: Tensor
    count: Tensor
    reduction: str = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """``loss``: scalar, sum of weight times loss over the rows. ``metrics`` by name, without prefix."""

    loss: Tensor
    metrics: Mapping[str, Metric]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRewards:
    """Rewards of a rollout: ``rewards`` ``(N,)`` float32, ``group_ids`` ``(N,)`` int64, ``valid`` ``(N,)`` bool.

    Groups may be uneven; invalid entries hold NaN and are masked, never reshaped away.
    """

    rewards: Tensor
    group_ids: Tensor
    valid: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """``values``: ``(N,)`` float32, 0 where invalid. ``statistics``: figures for the log, by full name."""

    values: Tensor
    statistics: Mapping[str, float] = EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """What one data-parallel rank trains on in one rollout: optimizer windows of micro-batches.

    ``windows[k][j]`` is micro-batch j of optimizer step k; counts agree over all ranks.
    ``window_weights[k]``: sum of the row weights of window k over all ranks (the divisor).
    """

    rollout_id: int
    windows: Sequence[Sequence[tuple[Pair, ...]]]
    window_weights: Sequence[float]
    sigmas: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One optimizer step: reduced metrics by full name (``train/loss`` …), and whether it was skipped."""

    rollout_id: int
    window: int
    global_step: int
    metrics: Mapping[str, float]
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """Rollout against trainer before the first optimizer step.

    ``by_step``: max absolute log-prob difference per denoising step number; ``rows``: pairs compared.
    """

    by_step: Mapping[int, float]
    rows: int

    @property
    def worst(self) -> float:
        """Largest difference over all steps, NaN if one is NaN; 0.0 when nothing was compared."""
        values = self.by_step.values()
        return next((value for value in values if value != value), max(values, default=0.0))  # noqa: PLR0124


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """Held-out scores after an iteration, by data set and sampler: means, and each sample's reward."""

    rollout_id: int
    version: int
    means: Mapping[str, float]
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer to an evaluation: ``action`` "keep" (this checkpoint) or "stop" (the run), and why."""

    action: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What a family may look at to claim a checkpoint: the reference and the parsed model_index.json."""

    reference: str
    model_index: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A family takes a checkpoint: ``by`` "class" (in model_index.json) or "name" (a pattern)."""

    family: str
    by: str
    pattern: str = ""
