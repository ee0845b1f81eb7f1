"""``Family``: what core must know about one model architecture, and ``Pipeline``: its sampling half."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drl.interfaces.outline import Outline
from drl.types import (
    EMPTY,
    Condition,
    ConditionRecord,
    Conditions,
    Context,
    Guidance,
    Media,
    RolloutRequest,
    Sampling,
    Streams,
)

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from drl.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDtypes:
    """Dtype of each forward input: "default" (forward dtype), "fp32", "bf16", "fp16", None = untouched."""

    latents: str | None = None
    condition: str | None = None
    timestep: str | None = None


PASSTHROUGH = InputDtypes()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPipelineConfig:
    """What core must know of one trainable component to train, wrap and sync it.

    ``lora_targets``: PEFT-style suffixes. ``trainable``: name globs for full fine-tuning. ``wrap``:
    class names that get their own ``fully_shard``. ``parameter_dtypes``: name glob to dtype.
    ``unsafe_dtypes``: refused as forward dtype. ``guidance``: "free" or "never". ``sde_divisor``:
    sigma = timestep / divisor in CPS. ``max_rows``, ``max_microgroup``: limits of one forward and of
    one request. ``batch_invariant``: rows do not influence each other. ``batched_guidance``: both
    predictions of guidance may share one forward.
    """

    lora_targets: tuple[str, ...]
    wrap: tuple[str, ...]
    trainable: tuple[str, ...] = ("*",)
    input_dtypes: InputDtypes = PASSTHROUGH
    parameter_dtypes: Mapping[str, str] = EMPTY
    unsafe_dtypes: frozenset[str] = frozenset()
    optimizer_state_may_miss: tuple[str, ...] = ()
    guidance: str = "free"
    joint_guidance: bool = False
    sde_divisor: float = 1.0
    train_timesteps: int = 1000
    max_rows: int | None = None
    max_microgroup: int | None = None
    batch_invariant: bool = True
    batched_guidance: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which component predicts at a timestep, and which guidance option applies to it."""

    component: str = "transformer"
    guidance_option: str = "guidance_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """Size of one row of a forward: latent axes, text tokens."""

    latent: tuple[int, ...]
    text_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Matrix products of one row, in floating-point operations (2 per multiply-add).

    ``forward``: one forward. ``backward``: with everything trained, the gradients of inputs and weights.
    ``input_gradient``: what is left of it when the weights are frozen and adapters sit on the family's
    own ``lora_targets``: gradients of inputs alone, and none before the first adapter. The adapters' own
    products come on top: ``drl.lora.work.adapter_flops``.
    """

    forward: float
    backward: float
    input_gradient: float

    def training(self, *, frozen: bool) -> float:
        """Return a forward and its backward; ``frozen``: only adapters are trained."""
        return self.forward + (self.input_gradient if frozen else self.backward)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """Where weights come from: a local pipeline folder or a hub id, the dtype to load, the device.

    ``meta``: build the module without weights (ranks other than 0); ``dtype`` "fp32", "bf16", "fp16".
    """

    checkpoint: str
    dtype: str = "fp32"
    device: str = "cpu"
    meta: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransform:
    """One renaming rule of the weight bridge: ``matches(name)`` and ``expand(name, full tensor)``."""

    matches: Any
    expand: Any


class Pipeline(ABC):
    """What an embedded engine, a supervised encoder and ``drl sample`` need around the model."""

    @abstractmethod
    def encode_text(self, prompts: Sequence[str]) -> list[ConditionRecord]:
        """Return one record per prompt; each prompt is encoded alone, so neighbours never matter."""

    @abstractmethod
    def encode_media(self, media: Media, generator: Generator) -> Streams:
        """Return the clean latents of one item, per stream ``(*L)`` float32."""

    @abstractmethod
    def sigmas(self, sampling: Sampling) -> Tensor:
        """Return the sigma table ``(S + 1,)`` float32, after shift, ending in 0."""

    @abstractmethod
    def timesteps(self, sampling: Sampling) -> Tensor:
        """Return the timesteps ``(S,)`` float32 that belong to ``sigmas``."""

    @abstractmethod
    def initial(self, sampling: Sampling, generator: Generator) -> Streams:
        """Draw the initial latents of one sample, per stream ``(*L)`` float32, from its generator."""

    @abstractmethod
    def decode(self, streams: Streams) -> list[Media]:
        """Decode clean latents, per stream ``(B, *L)``, into B items.

        Pixels may still be on the device that decoded them: who keeps them moves them, once a batch.
        """

    def expect(self, prompts: Sequence[str]) -> None:
        """Learn which prompts will come, so that they can be encoded ahead; a no-op by default."""
        return

    def release(self) -> None:
        """Give the device's memory back; the next use takes it again. A no-op by default."""
        return


class Family(ABC):
    """What core must know about one model architecture. No training logic.

    Constructed as ``Family(options, context)``; ``context.section`` is the recipe's ``[model]``.
    """

    model_kind: str = "diffusion"
    components: tuple[str, ...] = ("transformer",)
    streams: tuple[str, ...] = ("visual",)

    def __init__(self, options: Any, context: Context) -> None:
        self.options = options
        self.context = context

    @abstractmethod
    def pipeline_config(self, component: str, config: Mapping[str, Any]) -> TrainPipelineConfig:
        """Describe a component from its ``config.json`` alone, without weights."""

    def check(self, recipe: Any) -> Iterable[Problem]:
        """Yield what is wrong with a recipe for this model, once a run is being built."""
        return ()

    def flops(self, component: str, config: Mapping[str, Any], shape: RowShape) -> Flops | None:
        """Return the work of one row, or None when unknown (MFU is then not reported)."""
        return None

    def layer_rows(
        self, component: str, config: Mapping[str, Any], shape: RowShape, layer: str
    ) -> int | None:
        """Return how many vectors of one row pass through a layer: its stream's tokens, or 1; None when unknown.

        ``layer``: a plain module name. It gives the work of an adapter on that layer.
        """
        return None

    @abstractmethod
    def build(self, component: str, source: WeightSource) -> nn.Module:
        """Return the component with weights, or on the meta device when ``source.meta``."""

    @abstractmethod
    def component_config(self, component: str, checkpoint: str) -> Mapping[str, Any]:
        """Read the component's ``config.json`` from a local folder or the hub."""

    def checkpoint_transforms(self, component: str) -> Sequence[WeightTransform]:
        """Return the disk to model renaming rules; none by default."""
        return ()

    def engine_transforms(self, component: str, layout: str) -> Sequence[WeightTransform]:
        """Return the model to engine renaming rules for an engine layout; none by default."""
        return ()

    def finish(self, component: str, module: nn.Module) -> None:
        """Run after wrapping and loading: freeze, rebuild tables. Nothing by default."""
        return

    @abstractmethod
    def condition(self, record: ConditionRecord) -> Condition:
        """Turn a wire record into forward arguments of one row (a batch axis of 1)."""

    @abstractmethod
    def collate(self, conditions: Sequence[Condition], pad_to: int | None = None) -> Condition:
        """Join rows into one batch of forward arguments."""

    def route(self, timestep: float) -> Route:
        """Say which component predicts at this timestep."""
        return Route()

    @abstractmethod
    def model_time(self, sigma_B: Tensor, timestep_B: Tensor | None) -> Tensor:
        """Return what the model is fed as time, ``(B,)``, from sigma or the recorded timestep."""

    @abstractmethod
    def forward(
        self,
        model: nn.Module,
        streams: Streams,
        model_time_B: Tensor | None,
        condition: Condition,
    ) -> Streams:
        """Return the velocity (noise - x0) per stream ``(B, *L)``, without guidance."""

    @abstractmethod
    def guide(self, positive: Streams, negative: Streams, guidance: Guidance) -> Streams:
        """Combine the two predictions of classifier-free guidance."""

    def conditions(
        self, positive: Condition, negative: Condition | None, *, batched: bool
    ) -> Conditions:
        """Prepare what ``predict`` needs, once for all its calls; ``batched``: for one forward of 2B rows."""
        joint = self.collate([positive, negative]) if batched and negative is not None else None
        return Conditions(positive=positive, negative=negative, joint=joint)

    def predict(
        self,
        model: nn.Module,
        streams: Streams,
        model_time_B: Tensor | None,
        conditions: Conditions,
        guidance: Guidance,
    ) -> Streams:
        """Return the guided velocity per stream ``(B, *L)``; engine and trainer both ask for it here.

        One forward of B rows without guidance, two with it, or one of 2B rows for a joint condition.
        """
        if conditions.negative is None or not guidance.on:
            return self.forward(model, streams, model_time_B, conditions.positive)
        if conditions.joint is None:
            positive = self.forward(model, streams, model_time_B, conditions.positive)
            negative = self.forward(model, streams, model_time_B, conditions.negative)
            return self.guide(positive, negative, guidance)
        twice = {name: _twice(latents) for name, latents in streams.items()}
        time_2B = None if model_time_B is None else _twice(model_time_B)
        both = self.forward(model, twice, time_2B, conditions.joint)
        halves = {name: velocity.chunk(2) for name, velocity in both.items()}
        first = {name: half[0] for name, half in halves.items()}
        return self.guide(first, {name: half[1] for name, half in halves.items()}, guidance)

    def outline(self, checkpoint: str, sampling: Sampling) -> Outline | None:
        """Return shapes and weights of a recipe before it runs, for ``drl plan``; None when unknown.

        Reads configs alone; BadInput when they cannot be read.
        """
        return None

    def edit_request(self, request: RolloutRequest) -> RolloutRequest:
        """Drop or add what this model's engine needs; unchanged by default."""
        return request

    @abstractmethod
    def pipeline(self, checkpoint: str, context: Context) -> Pipeline | None:
        """Return the sampling half, or None: no embedded engine, no built-in encoding."""


def _twice(rows: Tensor) -> Tensor:
    """Return ``(2B, ...)``: the rows, and the same rows again."""
    return rows.repeat(2, *[1] * (rows.dim() - 1))
