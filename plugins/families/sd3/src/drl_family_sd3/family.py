"""Family ``sd3``: Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv 2403.03206).

The model is fed the timestep, 1000 times sigma, and predicts the velocity noise - x0. Its three
text encoders become two forward arguments, ``encoder_hidden_states`` and ``pooled_projections``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drl.api import (
    VISUAL,
    BadInput,
    Condition,
    ConditionRecord,
    Context,
    Family,
    Flops,
    Guidance,
    Outline,
    Pipeline,
    Problem,
    RowShape,
    Sampling,
    Streams,
    TrainPipelineConfig,
    WeightSource,
)
from drl_family_sd3.checkpoint import build_transformer, read_config, read_index
from drl_family_sd3.flops import layer_tokens, row_flops
from drl_family_sd3.forward import combine, condition_of, join, predict
from drl_family_sd3.outline import outline
from drl_family_sd3.pipeline import Sd3Pipeline, sizes_of

if TYPE_CHECKING:
    from torch import Tensor, nn

LORA_TARGETS = tuple(
    f"attn.{name}"
    for name in (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
)
TRAIN_TIMESTEPS = 1000


class Sd3Family(Family):
    """What core must know about Stable Diffusion 3."""

    def pipeline_config(self, component: str, config: Mapping[str, Any]) -> TrainPipelineConfig:
        """Describe the transformer; the same for all sizes of the model."""
        _known(component)
        return TrainPipelineConfig(
            lora_targets=LORA_TARGETS,
            wrap=("JointTransformerBlock",),
            sde_divisor=float(TRAIN_TIMESTEPS),
            train_timesteps=TRAIN_TIMESTEPS,
        )

    def check(self, recipe: Any) -> Iterable[Problem]:
        """Yield sizes that do not fit the checkpoint, and options that this model ignores."""
        sampling = recipe.sampling
        yield from sizes_of(recipe.model.checkpoint).problems(sampling.height, sampling.width)
        if sampling.num_frames != 1:
            yield Problem("sampling.num_frames", "this model makes single pictures; use 1")
        if sampling.true_cfg_scale is not None:
            yield Problem(
                "sampling.true_cfg_scale",
                "family 'sd3' has one guidance scale; use sampling.guidance_scale",
            )

    def flops(self, component: str, config: Mapping[str, Any], shape: RowShape) -> Flops | None:
        """Return the matrix products of one row."""
        _known(component)
        return row_flops(config, shape)

    def layer_rows(
        self, component: str, config: Mapping[str, Any], shape: RowShape, layer: str
    ) -> int:
        """Return the image or text tokens of a layer, 1 for those of time and pooled text."""
        _known(component)
        return layer_tokens(config, shape, layer)

    def outline(self, checkpoint: str, sampling: Sampling) -> Outline:
        """Return the shapes of a recipe, and what the text encoders and the VAE take."""
        return outline(checkpoint, self.options, sampling)

    def build(self, component: str, source: WeightSource) -> nn.Module:
        """Return the transformer; its position table is float32 whatever ``source.dtype`` is."""
        _known(component)
        read_index(source.checkpoint)
        return build_transformer(source)

    def component_config(self, component: str, checkpoint: str) -> Mapping[str, Any]:
        """Read the transformer's config.json."""
        _known(component)
        return read_config(checkpoint, component)

    def condition(self, record: ConditionRecord) -> Condition:
        """Turn a record into the two forward arguments, each with a batch axis of 1."""
        return condition_of(record)

    def collate(self, conditions: Sequence[Condition], pad_to: int | None = None) -> Condition:
        """Join rows; ``pad_to`` is not needed, every prompt is padded to one length."""
        return join(conditions)

    def model_time(self, sigma_B: Tensor, timestep_B: Tensor | None) -> Tensor:
        """Return the recorded timestep, else ``1000 sigma``; ``(B,)``."""
        return timestep_B if timestep_B is not None else sigma_B * TRAIN_TIMESTEPS

    def forward(
        self,
        model: nn.Module,
        streams: Streams,
        model_time_B: Tensor | None,
        condition: Condition,
    ) -> Streams:
        """Return the velocity of the visual stream ``(B, C, H, W)``."""
        if model_time_B is None:
            raise BadInput("family 'sd3' needs a timestep for every row")
        return {VISUAL: predict(model, streams[VISUAL], model_time_B, condition)}

    def guide(self, positive: Streams, negative: Streams, guidance: Guidance) -> Streams:
        """Return ``u + g (p - u)`` with the plain guidance scale."""
        return combine(positive, negative, guidance)

    def pipeline(self, checkpoint: str, context: Context) -> Pipeline:
        """Load text encoders, scheduler and VAE."""
        return Sd3Pipeline(checkpoint, self.options, context)


def _known(component: str) -> None:
    if component != "transformer":
        raise BadInput(
            f"model.components: Stable Diffusion 3 has no trainable component {component!r}; "
            "use ['transformer']"
        )
