"""``Family``: what core must know about one model architecture, and ``Pipeline``: its sampling half."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drl.types import (
    EMPTY,
    Condition,
    ConditionRecord,
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
    one request. ``batch_invariant``: rows do not influence each other.
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
    """Multiply-add work of one row in floating-point operations: a forward, and a backward."""

    forward: float
    backward: float


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
        """Decode clean latents, per stream ``(B, *L)``, into B items."""


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

    def edit_request(self, request: RolloutRequest) -> RolloutRequest:
        """Drop or add what this model's engine needs; unchanged by default."""
        return request

    @abstractmethod
    def pipeline(self, checkpoint: str, context: Context) -> Pipeline | None:
        """Return the sampling half, or None: no embedded engine, no built-in encoding."""
