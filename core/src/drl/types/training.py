"""From pair to loss: what the trainer feeds, predicts and reduces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drl.components import EMPTY
from drl.types.sample import Condition, ConditionRecord
from drl.types.stream import Streams

if TYPE_CHECKING:
    from torch import Tensor


def successor(stream: str) -> str:
    """Key of the recorded next latents of a stream in ``Pair.tensors``."""
    return f"{stream}.next"


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
