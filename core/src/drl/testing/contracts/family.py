"""``FamilyContract``: what every model family keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drl.interfaces.family import (
    Family,
    Pipeline,
    RowShape,
    TrainPipelineConfig,
    WeightSource,
)
from drl.lora import LoraConfig, inject, lora_layers, to_pushed_name
from drl.testing.contracts.base import ContractBase
from drl.types import Condition, Context, Guidance, Media, Sampling, Streams

TOLERANCE = 1e-5
"""A prediction alone and in a batch: other matrix kernels, so other last bits."""


class FamilyContract(ContractBase):
    """Shapes, rows, guidance, adapters and names of one family, on a checkpoint of toy size.

    The author overrides ``checkpoint``, the folder of a small pipeline with random weights that loads in
    a second. ``sampling`` and ``prompts`` may be overridden too. Capabilities: ``pipeline`` (the family
    has a sampling half), ``batch_invariant``, ``media`` (it encodes media), ``guidance``.
    """

    name = "transformer"
    """The component under test."""

    @pytest.fixture
    def checkpoint(self) -> str:
        """Folder of a small pipeline."""
        raise NotImplementedError(f"{type(self).__name__} must give the fixture checkpoint")

    @pytest.fixture
    def sampling(self) -> Sampling:
        """Sizes and steps that the small pipeline can do."""
        return Sampling(num_steps=3, height=32, width=32)

    @pytest.fixture
    def prompts(self) -> tuple[str, ...]:
        """Prompts of unequal length, one of them empty."""
        return ("a sign", 'a wooden sign that says "OPEN" in a street', "")

    @pytest.fixture
    def model(self, instance: Family, checkpoint: str) -> nn.Module:
        """The component with its weights."""
        return instance.build(self.name, WeightSource(checkpoint=checkpoint))

    @pytest.fixture
    def config(self, instance: Family, checkpoint: str) -> TrainPipelineConfig:
        """What the family says of the component, from its config.json alone."""
        return instance.pipeline_config(self.name, instance.component_config(self.name, checkpoint))

    @pytest.fixture
    def pipeline(self, instance: Family, checkpoint: str, context: Context) -> Pipeline:
        """The sampling half."""
        self.require("pipeline")
        made = instance.pipeline(checkpoint, context)
        assert made is not None, "pipeline() is None; state pipeline = False in capabilities"
        return made

    @pytest.fixture
    def conditions(
        self, instance: Family, pipeline: Pipeline, prompts: tuple[str, ...]
    ) -> list[Condition]:
        """One condition per prompt."""
        return [instance.condition(record) for record in pipeline.encode_text(prompts)]

    @pytest.fixture
    def latents(self, pipeline: Pipeline, sampling: Sampling, prompts: tuple[str, ...]) -> Streams:
        """Initial latents, a row per prompt."""
        rows = [pipeline.initial(sampling, seeded(seed)) for seed in range(len(prompts))]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    @pytest.fixture
    def times(self, instance: Family, prompts: tuple[str, ...]) -> Tensor:
        """Another time for every row."""
        return instance.model_time(torch.linspace(1.0, 0.3, len(prompts)), None)

    @pytest.fixture
    def prediction(
        self,
        instance: Family,
        model: nn.Module,
        latents: Streams,
        times: Tensor,
        conditions: list[Condition],
    ) -> Streams:
        """Predictions of all rows in one batch."""
        with torch.no_grad():
            return instance.forward(model, latents, times, instance.collate(conditions))

    def test_a_prediction_has_the_shape_of_the_latents(
        self, instance: Family, latents: Streams, prediction: Streams
    ) -> None:
        assert set(prediction) == set(latents) == set(instance.streams)
        for name, tensor in prediction.items():
            assert tensor.shape == latents[name].shape
            assert bool(torch.isfinite(tensor).all())

    def test_a_row_alone_is_the_row_in_a_batch(
        self,
        instance: Family,
        model: nn.Module,
        latents: Streams,
        times: Tensor,
        conditions: list[Condition],
        prediction: Streams,
    ) -> None:
        self.require("batch_invariant")
        for i, condition in enumerate(conditions):
            row = {name: tensor[i : i + 1] for name, tensor in latents.items()}
            with torch.no_grad():
                alone = instance.forward(
                    model, row, times[i : i + 1], instance.collate([condition])
                )
            for name, tensor in alone.items():
                assert torch.allclose(tensor[0], prediction[name][i], atol=TOLERANCE), name

    def test_prompts_of_unequal_length_collate(
        self, instance: Family, conditions: list[Condition]
    ) -> None:
        assert instance.collate(conditions).rows == len(conditions)
        nested = instance.collate([instance.collate(conditions[:2]), *conditions[2:]])
        assert nested.rows == len(conditions)

    def test_guidance_at_scale_one_is_the_conditional_prediction(
        self, instance: Family, prediction: Streams
    ) -> None:
        self.require("guidance")
        negative = {name: tensor.roll(1, 0) for name, tensor in prediction.items()}
        same = instance.guide(prediction, negative, Guidance(scale=1.0))
        more = instance.guide(prediction, negative, Guidance(scale=3.0))
        for name, tensor in prediction.items():
            assert torch.allclose(same[name], tensor, atol=TOLERANCE), name
            assert not torch.allclose(more[name], tensor, atol=TOLERANCE), name
            assert same[name].dtype == tensor.dtype

    def test_joined_guidance_predicts_what_two_forwards_do(
        self,
        instance: Family,
        model: nn.Module,
        config: TrainPipelineConfig,
        latents: Streams,
        times: Tensor,
        conditions: list[Condition],
    ) -> None:
        self.require("guidance")
        if not config.batched_guidance:
            pytest.skip("the family needs a forward for each prediction of guidance")
        both = instance.collate(conditions), instance.collate(conditions[::-1])
        with torch.no_grad():
            apart, joined = (
                instance.predict(
                    model,
                    latents,
                    times,
                    instance.conditions(*both, batched=batched),
                    Guidance(scale=3.0),
                )
                for batched in (False, True)
            )
        for name, tensor in apart.items():
            # guidance multiplies the rounding of both predictions
            assert torch.allclose(joined[name], tensor, atol=5 * TOLERANCE), name

    def test_every_lora_target_exists_and_nothing_else_trains(
        self, model: nn.Module, config: TrainPipelineConfig
    ) -> None:
        inject(model, lora_of(config), generator=seeded(0))
        layers = lora_layers(model)
        for target in config.lora_targets:
            assert [name for name in layers if f".{name}".endswith(f".{target}")], target
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert len(trained) == 2 * len(layers)
        assert all(".lora_A." in name or ".lora_B." in name for name in trained)

    def test_names_survive_adapters_and_the_way_to_an_engine(
        self, model: nn.Module, config: TrainPipelineConfig
    ) -> None:
        plain = set(model.state_dict())
        inject(model, lora_of(config), generator=seeded(0))
        pushed = {to_pushed_name(key) for key in model.state_dict()}
        adapters = {name for name in pushed if name.endswith((".lora_A", ".lora_B"))}
        assert pushed - adapters == plain
        assert {f"{name.rpartition('.')[0]}.weight" for name in adapters} <= plain

    def test_classes_to_wrap_are_in_the_model(
        self, model: nn.Module, config: TrainPipelineConfig
    ) -> None:
        found = {type(module).__name__ for module in model.modules()}
        assert config.wrap, "wrap names no class: nothing would be sharded"
        assert set(config.wrap) <= found

    def test_a_meta_build_has_the_same_tensors_and_no_memory(
        self, instance: Family, model: nn.Module, checkpoint: str
    ) -> None:
        blank = instance.build(self.name, WeightSource(checkpoint=checkpoint, meta=True))
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        assert {name: tensor.shape for name, tensor in blank.state_dict().items()} == shapes
        assert all(tensor.is_meta for tensor in blank.state_dict().values())

    def test_building_leaves_the_global_random_state_alone(
        self, instance: Family, checkpoint: str
    ) -> None:
        before = torch.get_rng_state()
        instance.build(self.name, WeightSource(checkpoint=checkpoint))
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_component_is_described_by_plain_json(
        self, instance: Family, checkpoint: str, config: TrainPipelineConfig
    ) -> None:
        read = json.loads(json.dumps(dict(instance.component_config(self.name, checkpoint))))
        assert instance.pipeline_config(self.name, read) == config

    def test_work_grows_with_the_picture(
        self, instance: Family, checkpoint: str, pipeline: Pipeline, sampling: Sampling
    ) -> None:
        read = instance.component_config(self.name, checkpoint)
        latent = tuple(next(iter(pipeline.initial(sampling, seeded(0)).values())).shape)
        larger = (*latent[:-1], 2 * latent[-1])
        small, large = (
            instance.flops(self.name, read, RowShape(latent=shape, text_tokens=16))
            for shape in (latent, larger)
        )
        if small is None or large is None:
            pytest.skip("the family states no work: MFU is not reported for it")
        assert 0 < small.forward < large.forward
        assert small.backward >= small.forward
        assert 0 < small.input_gradient <= small.backward
        assert small.training(frozen=True) <= small.training(frozen=False)

    def test_the_sigma_table_falls_to_zero(
        self, instance: Family, pipeline: Pipeline, sampling: Sampling
    ) -> None:
        sigmas, timesteps = pipeline.sigmas(sampling), pipeline.timesteps(sampling)
        assert sigmas.dtype == timesteps.dtype == torch.float32
        assert sigmas.shape == (sampling.num_steps + 1,)
        assert timesteps.shape == (sampling.num_steps,)
        assert float(sigmas[0]) <= 1.0
        assert float(sigmas[-1]) == 0.0
        assert bool((sigmas[1:] < sigmas[:-1]).all())
        recorded = instance.model_time(sigmas[:-1], timesteps)
        assert torch.allclose(instance.model_time(sigmas[:-1], None), recorded, rtol=1e-5)

    def test_initial_latents_depend_on_the_seed_alone(
        self, pipeline: Pipeline, sampling: Sampling
    ) -> None:
        first, again, other = (pipeline.initial(sampling, seeded(seed)) for seed in (1, 1, 2))
        for name, tensor in first.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, again[name])
            assert not torch.equal(tensor, other[name])

    def test_a_prompt_is_encoded_alone(self, pipeline: Pipeline, prompts: tuple[str, ...]) -> None:
        together = pipeline.encode_text(prompts)
        for prompt, record in zip(prompts, together, strict=True):
            (alone,) = pipeline.encode_text([prompt])
            for name, tensor in record.tensors.items():
                assert torch.equal(alone.tensors[name], tensor), (prompt, name)
        assert any(
            not torch.equal(tensor, together[1].tensors[name])
            for name, tensor in together[0].tensors.items()
        )

    def test_what_was_released_comes_back_with_the_same_bits(
        self, pipeline: Pipeline, prompts: tuple[str, ...], latents: Streams
    ) -> None:
        pipeline.expect(prompts)
        records, decoded = pipeline.encode_text(prompts), pipeline.decode(latents)
        pipeline.release()
        again = pipeline.encode_text(prompts)
        for record, repeated in zip(records, again, strict=True):
            for name, tensor in record.tensors.items():
                assert torch.equal(repeated.tensors[name], tensor), name
        for media, other in zip(decoded, pipeline.decode(latents), strict=True):
            assert torch.equal(media.pixels, other.pixels)

    def test_decoding_gives_media_of_the_asked_size(
        self, pipeline: Pipeline, sampling: Sampling, latents: Streams
    ) -> None:
        decoded = pipeline.decode(latents)
        for media in decoded:
            frames, height, width = media.pixels.shape[-3:]
            assert (frames, height, width) == (
                sampling.num_frames,
                sampling.height,
                sampling.width,
            )
            assert media.pixels.dtype == torch.float32
            assert 0.0 <= float(media.pixels.min()) <= float(media.pixels.max()) <= 1.0
        (alone,) = pipeline.decode({name: tensor[1:2] for name, tensor in latents.items()})
        assert torch.equal(alone.pixels, decoded[1].pixels)

    def test_media_encode_to_latents(
        self, pipeline: Pipeline, sampling: Sampling, latents: Streams
    ) -> None:
        self.require("media")
        shape = (3, sampling.num_frames, sampling.height, sampling.width)
        media = Media(pixels=torch.rand(shape, generator=seeded(0)))
        first, again = (pipeline.encode_media(media, seeded(1)) for _ in range(2))
        for name, tensor in first.items():
            assert tensor.shape == latents[name].shape[1:]
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, again[name])


def seeded(seed: int) -> torch.Generator:
    """Return a CPU generator."""
    return torch.Generator().manual_seed(seed)


def lora_of(config: TrainPipelineConfig) -> LoraConfig:
    """Return a rank 2 adapter on the family's targets."""
    fields: dict[str, Any] = {"rank": 2, "alpha": 4, "target_modules": config.lora_targets}
    return LoraConfig(**fields)
