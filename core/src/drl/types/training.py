"""From pair to loss: what the trainer feeds, predicts and reduces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from drl.components import EMPTY
from drl.types.sample import ConditionRecord, Conditions
from drl.types.stream import Streams

if TYPE_CHECKING:
    from torch import Tensor


def successor(stream: str) -> str:
    """Key of the recorded next latents of a stream in ``Pair.tensors``."""
    return f"{stream}.next"


def rejected(stream: str) -> str:
    """Key of the worse of a preference's two latents, in ``Sample.clean`` and ``Pair.tensors``."""
    return f"{stream}.rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The training row that a loss's ``expand`` makes.

    ``id`` names its noise, its log line and its place (sample index, step number …). Pairs of one
    ``unit`` never part across optimizer windows. ``tensors``: per stream ``(*L)`` float32, and under
    ``successor(stream)`` the recorded next latents. ``weight`` multiplies the loss and enters the
    divisor; 0 marks filler, removed and failed samples. ``values``: scalars by name. ``debug``: the
    engine's own tensors of the step, where ``debug.engine_debug`` asks for them; no loss reads them.
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
    debug: Streams = EMPTY


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
    ``rows_per_pair``: n for streams of ``n B`` rows, in which row ``k B + i`` is the k-th of pair i; all
    rows of a pair share its condition and model time.
    """

    streams: Streams
    model_time_B: Tensor | None = None
    conditions: Conditions | None = None
    guidance: Guidance = Guidance()
    extras: Streams = EMPTY
    rows_per_pair: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Model outputs after guidance, per stream as in ``ForwardInputs``; the others on demand."""

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

    @property
    def joint_log_prob(self) -> Tensor:
        """The log-prob of all streams together, ``(B,)``."""
        return reduce(add, self.log_prob_B.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure of a micro-batch. ``reduction``: "mean" (total / count) or "max" (total alone).

    ``total`` and ``count`` are detached scalars (tensors stay on the device until the step ends).
    ``by_component``: a model of several components has the figure of each as well, ``name_component``.
    """

    total: Tensor
    count: Tensor
    reduction: str = "mean"
    by_component: bool = False

    @classmethod
    def weighted(cls, values_B: Tensor, weight_B: Tensor, *, by_component: bool = False) -> Metric:
        """Return the mean of the rows' values by their weights; a row of weight 0 does not count."""
        total = (weight_B * values_B.detach()).sum()
        return cls(total=total, count=weight_B.sum(), by_component=by_component)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """``loss``: scalar, sum of weight times loss over the rows. ``metrics`` by name, without prefix."""

    loss: Tensor
    metrics: Mapping[str, Metric]

    @classmethod
    def weighted(
        cls, loss_B: Tensor, weight_B: Tensor, figures_B: Mapping[str, Tensor]
    ) -> LossOutput:
        """Return the weighted sum of the rows' losses, and the weighted mean of each figure ``(B,)``.

        The loss itself is logged as ``loss``.
        """
        total, count = (weight_B * loss_B).sum(), weight_B.sum()
        metrics = {"loss": Metric(total=total.detach(), count=count)}
        for name, values_B in figures_B.items():
            metrics[name] = Metric(total=(weight_B * values_B.detach()).sum(), count=count)
        return cls(loss=total, metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRewards:
    """Rewards of a rollout: ``rewards`` ``(N,)`` float32, ``group_ids`` ``(N,)`` int64, ``valid`` ``(N,)`` bool.

    Groups may be uneven; invalid entries hold NaN and are masked, never reshaped away. ``terms``:
    ``(N, K)`` float32, the scores that ``rewards`` is the weighted sum of, NaN where a sample has none;
    None when only the sum is known. ``weights`` and ``names`` are those of its columns.
    """

    rewards: Tensor
    group_ids: Tensor
    valid: Tensor
    terms: Tensor | None = None
    weights: tuple[float, ...] = ()
    names: tuple[str, ...] = ()


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
