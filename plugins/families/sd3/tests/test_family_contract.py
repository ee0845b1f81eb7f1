"""The family contract fails on families that mix rows, misname layers, drift or depend on the process.

Each wrong family is ``sd3`` with one thing changed; that ``sd3`` itself passes is in test_contract.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from contract_runs import Verdict, judged, offered, plugin_in
from torch import Generator, Tensor, nn

from drl.api import (
    API_VERSION,
    VISUAL,
    Component,
    Condition,
    ConditionRecord,
    Context,
    Flops,
    Guidance,
    Media,
    Pipeline,
    RowShape,
    Sampling,
    Streams,
    TrainPipelineConfig,
    WeightSource,
    hookimpl,
)
from drl.catalog import Catalog
from drl.testing.contracts.family import FamilyContract
from drl_family_sd3.family import Sd3Family
from drl_family_sd3.pipeline import Sd3Pipeline

DRL_API = API_VERSION


class Predicting(Sd3Family):
    """Changes what the model predicts."""

    def forward(
        self,
        model: nn.Module,
        streams: Streams,
        model_time_B: Tensor | None,
        condition: Condition,
    ) -> Streams:
        return {VISUAL: self.seen(super().forward(model, streams, model_time_B, condition)[VISUAL])}

    def seen(self, velocity: Tensor) -> Tensor:
        return velocity


class Flattening(Predicting):
    """Answers in tokens."""

    def seen(self, velocity: Tensor) -> Tensor:
        return velocity.flatten(2)


class Averaging(Predicting):
    """Takes something of every neighbour."""

    def seen(self, velocity: Tensor) -> Tensor:
        return velocity + 0.01 * velocity.mean(0, keepdim=True)


class Counting(Sd3Family):
    """Counts conditions where it should count rows."""

    def collate(self, conditions: Sequence[Condition], pad_to: int | None = None) -> Condition:
        joined = super().collate(conditions, pad_to)
        return Condition(arguments=joined.arguments, rows=len(conditions))


class Unguided(Sd3Family):
    def guide(self, positive: Streams, negative: Streams, guidance: Guidance) -> Streams:
        return positive


class Shifted(Sd3Family):
    """Counts guidance from 0, as papers do."""

    def guide(self, positive: Streams, negative: Streams, guidance: Guidance) -> Streams:
        return super().guide(positive, negative, Guidance(scale=guidance.scale + 1))


class Describing(Sd3Family):
    """Changes what is said of the component."""

    changes: ClassVar[Mapping[str, Any]] = {}

    def pipeline_config(self, component: str, config: Mapping[str, Any]) -> TrainPipelineConfig:
        return replace(super().pipeline_config(component, config), **self.changes)


class Misnaming(Describing):
    """Names a layer of another model's attention."""

    changes: ClassVar[Mapping[str, Any]] = {"lora_targets": ("attn.to_q", "attn.qkv")}


class Unwrapped(Describing):
    changes: ClassVar[Mapping[str, Any]] = {"wrap": ("FluxTransformerBlock",)}


class Bare(Describing):
    changes: ClassVar[Mapping[str, Any]] = {"wrap": ()}


class Opaque(Sd3Family):
    """Describes the component by what no file can hold."""

    def component_config(self, component: str, checkpoint: str) -> Mapping[str, Any]:
        return {**super().component_config(component, checkpoint), "dtype": torch.float32}


class Heavy(Sd3Family):
    """Loads weights when asked for none."""

    def build(self, component: str, source: WeightSource) -> nn.Module:
        return super().build(component, replace(source, meta=False))


class Seeding(Sd3Family):
    def build(self, component: str, source: WeightSource) -> nn.Module:
        torch.manual_seed(0)
        return super().build(component, source)


class Flat(Sd3Family):
    """Believes that every picture is the same work."""

    def flops(self, component: str, config: Mapping[str, Any], shape: RowShape) -> Flops | None:
        return Flops(forward=1e9, backward=2e9, input_gradient=1e9)


class Free(Sd3Family):
    """Believes that frozen weights cost nothing in a backward pass."""

    def flops(self, component: str, config: Mapping[str, Any], shape: RowShape) -> Flops | None:
        work = super().flops(component, config, shape)
        return None if work is None else replace(work, input_gradient=0.0)


class Timeless(Sd3Family):
    """Feeds sigma in replay and the timestep in rollout."""

    def model_time(self, sigma_B: Tensor, timestep_B: Tensor | None) -> Tensor:
        return timestep_B if timestep_B is not None else sigma_B


class Piped(Sd3Family):
    """Has a pipeline of another class."""

    other: type[Sd3Pipeline] = Sd3Pipeline

    def pipeline(self, checkpoint: str, context: Context) -> Pipeline:
        return self.other(checkpoint, self.options, context)


class Headless(Sd3Family):
    """Has no sampling half and does not say so."""

    def pipeline(self, checkpoint: str, context: Context) -> Any:
        return None


class StoppingShort(Sd3Pipeline):
    def sigmas(self, sampling: Sampling) -> Tensor:
        return super().sigmas(sampling).clamp(min=1e-3)


class Rising(Sd3Pipeline):
    def sigmas(self, sampling: Sampling) -> Tensor:
        return super().sigmas(sampling).flip(0)


class Global(Sd3Pipeline):
    """Draws first latents from the process."""

    def initial(self, sampling: Sampling, generator: Generator) -> Streams:
        return {VISUAL: torch.randn(self.sizes.latent(sampling))}


class Chatty(Sd3Pipeline):
    """Pads a prompt by its neighbours."""

    def encode_text(self, prompts: Sequence[str]) -> list[ConditionRecord]:
        return [
            ConditionRecord(
                tensors={name: tensor * len(prompts) for name, tensor in record.tensors.items()}
            )
            for record in super().encode_text(prompts)
        ]


class Illiterate(Sd3Pipeline):
    """Encodes every prompt as the empty one."""

    def encode_text(self, prompts: Sequence[str]) -> list[ConditionRecord]:
        return super().encode_text([""] * len(prompts))


class Signed(Sd3Pipeline):
    """Decodes into [-1, 1]."""

    def decode(self, streams: Streams) -> list[Media]:
        return [Media(pixels=2 * media.pixels - 1) for media in super().decode(streams)]


class Half(Sd3Pipeline):
    def decode(self, streams: Streams) -> list[Media]:
        return [Media(pixels=media.pixels[..., ::2, ::2]) for media in super().decode(streams)]


class Restless(Sd3Pipeline):
    """Draws from the posterior with the process's own dice."""

    def encode_media(self, media: Media, generator: Generator) -> Streams:
        seed = int(torch.randint(2**31, ()))
        return super().encode_media(media, torch.Generator().manual_seed(seed))


class Rounding(Sd3Pipeline):
    """Puts its VAE away in bf16."""

    def release(self) -> None:
        super().release()
        self._vae.get().to(torch.bfloat16).to(torch.float32)


class PipedRounding(Piped):
    other = Rounding


class PipedStoppingShort(Piped):
    other = StoppingShort


class PipedRising(Piped):
    other = Rising


class PipedGlobal(Piped):
    other = Global


class PipedChatty(Piped):
    other = Chatty


class PipedIlliterate(Piped):
    other = Illiterate


class PipedSigned(Piped):
    other = Signed


class PipedHalf(Piped):
    other = Half


class PipedRestless(Piped):
    other = Restless


GUIDANCE = "test_guidance_at_scale_one_is_the_conditional_prediction"
WRAP = "test_classes_to_wrap_are_in_the_model"
TABLE = "test_the_sigma_table_falls_to_zero"
ENCODED = "test_a_prompt_is_encoded_alone"
DECODED = "test_decoding_gives_media_of_the_asked_size"
LORA = "test_every_lora_target_exists_and_nothing_else_trains"

CASES: list[tuple[type[Sd3Family], str, str]] = [
    (Flattening, "test_a_prediction_has_the_shape_of_the_latents", "torch.Size"),
    (Averaging, "test_a_row_alone_is_the_row_in_a_batch", "allclose"),
    (Counting, "test_prompts_of_unequal_length_collate", "2 == 3"),
    (Unguided, GUIDANCE, "not True"),
    (Shifted, GUIDANCE, "visual"),
    (Unwrapped, WRAP, "{'FluxTransformerBlock'} <= "),
    (Bare, WRAP, "wrap names no class: nothing would be sharded"),
    (Opaque, "test_a_component_is_described_by_plain_json", "not JSON serializable"),
    (Heavy, "test_a_meta_build_has_the_same_tensors_and_no_memory", "is_meta"),
    (Seeding, "test_building_leaves_the_global_random_state_alone", "torch.equal"),
    (Flat, "test_work_grows_with_the_picture", "1000000000.0 < 1000000000.0"),
    (Free, "test_work_grows_with_the_picture", "0 < 0.0"),
    (Timeless, TABLE, "recorded"),
    (Headless, TABLE, "pipeline() is None; state pipeline = False in capabilities"),
    (PipedRounding, "test_what_was_released_comes_back_with_the_same_bits", "torch.equal"),
    (PipedStoppingShort, TABLE, "== 0.0"),
    (PipedRising, TABLE, "assert 1.0 == 0.0"),
    (PipedGlobal, "test_initial_latents_depend_on_the_seed_alone", "torch.equal"),
    (PipedChatty, ENCODED, "a sign"),
    (PipedIlliterate, ENCODED, "assert False"),
    (PipedSigned, DECODED, "0.0 <= -"),
    (PipedHalf, DECODED, "(1, 16, 16) == (1, 32, 32)"),
    (PipedRestless, "test_media_encode_to_latents", "torch.equal"),
]


@hookimpl
def drl_register_families() -> list[Component]:
    classes = [Misnaming, *[case[0] for case in CASES]]
    return offered(classes, config="drl_family_sd3.config:Sd3Options")


class Checks(FamilyContract):
    __test__ = False
    component: ClassVar[tuple[str, str]] = ("family", "sd3family")

    @pytest.fixture
    def catalog(self) -> Catalog:
        return plugin_in(__name__)

    @pytest.fixture
    def option_values(self) -> dict[str, Any]:
        return {"decode_rows": 4}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> dict[str, Verdict]:
    members = {"checkpoint": pytest.fixture(lambda self: tiny)}
    cases = [(wrong, check) for wrong, check, _ in [*CASES, (Misnaming, LORA, "")]]
    folder = tmp_path_factory.mktemp("checks")
    return judged(Checks, folder, cases, members=members)


@pytest.mark.parametrize(("wrong", "check", "said"), CASES)
def test_a_wrong_family_is_caught(
    verdicts: dict[str, Verdict], wrong: type[Sd3Family], check: str, said: str
) -> None:
    assert said in verdicts[wrong.__name__].failed[check]


def test_a_target_that_no_layer_has_is_named(verdicts: dict[str, Verdict]) -> None:
    assert "attn.qkv" in verdicts["Misnaming"].failed[LORA]
