"""The adapter of a run in other libraries: the same picture as drl's own engine, at the same strength."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from e2e import run_here, write_recipe
from peft import PeftModel

from drl.catalog import Catalog
from drl.cluster.background import Background
from drl.cluster.engines import InlineEngines
from drl.interfaces.engine import Launch
from drl.interfaces.family import WeightSource
from drl.lora import adapters, load_peft
from drl.stages.sync import push_component
from drl.testing import make_prompt
from drl.types import Context, RolloutRequest, Sampling
from drl_family_sd3.tiny import build_random

SEED = 11
PROMPT = "sign number 1"
SAMPLING = Sampling(num_steps=4, height=32, width=32, generator_device="cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline") / "tiny-sd3"
    build_random(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, checkpoint)
    # a large learning rate, so that a wrong strength could not hide in rounding
    run_here(recipe, folder / "run", "optimizer.lr=0.05", "train.num_rollout=2", "eval.datasets=[]")
    return folder / "run" / "adapter"


def drl_picture(checkpoint, adapter):
    """Generate with the embedded engine, the adapter pushed as in a run."""
    catalog, context = Catalog.load(), Context()
    section = SimpleNamespace(
        checkpoint=str(checkpoint), type="ode", noise_level=0.0, log_prob_no_const=True
    )
    with_section = Context(section=section)
    options = catalog.options_model("family", "sd3")()
    family = catalog.create("family", "sd3", options, with_section)
    backend = catalog.create("sde_backend", "ode", None, with_section)
    engine = catalog.create("engine", "local", catalog.options_model("engine", "local")(), context)
    updater = catalog.create("updater", "in_process_lora", None, context)
    background = Background()
    engines = InlineEngines("local", engine, background)
    try:
        engines.start(
            Launch(checkpoint=str(checkpoint), family=family, sde_backends={"ode": backend})
        )
        if adapter is not None:
            module = family.build("transformer", WeightSource(checkpoint=str(checkpoint)))
            load_peft(module, adapter)
            assert max(a.B.abs().max().item() for a in adapters(module).values()) > 0.01
            updater.connect(context, engines.handles())
            engines.begin_update(1)
            push_component(updater, "transformer", module, 1, buffer_bytes=2**20)
            engines.end_update(1)
        request = RolloutRequest(
            prompt=make_prompt(PROMPT),
            group_index=0,
            members=(0,),
            seeds=(SEED,),
            sampling=SAMPLING,
            sde_steps=(),
            kept_latents=(),
            evaluation=True,
        )
        (sample,) = background.run(engines.generate(request))
        return sample.media.pixels[:, 0]
    finally:
        engines.close()
        background.close()


@pytest.fixture(scope="module")
def ours(checkpoint, adapter):
    return drl_picture(checkpoint, adapter)


def diffusers_picture(pipe):
    channels = pipe.transformer.config.in_channels
    side = 32 // pipe.vae_scale_factor
    noise = torch.randn((1, channels, side, side), generator=torch.Generator().manual_seed(SEED))
    with torch.no_grad():
        return pipe(
            PROMPT,
            latents=noise,
            height=32,
            width=32,
            num_inference_steps=4,
            guidance_scale=1.0,
            max_sequence_length=pipe.tokenizer_3.model_max_length,
            output_type="pt",
        ).images[0]


@pytest.fixture
def pipe(checkpoint):
    made = StableDiffusion3Pipeline.from_pretrained(checkpoint)
    made.set_progress_bar_config(disable=True)
    return made


def close(left, right):
    return torch.allclose(left, right, rtol=0, atol=2e-5)


def test_the_adapter_changes_the_picture_so_that_strength_shows(checkpoint, ours, pipe):
    base = diffusers_picture(pipe)
    assert close(base, drl_picture(checkpoint, None))
    assert (base - ours).abs().max() > 0.02


def test_diffusers_pipeline_with_default_arguments(ours, adapter, pipe):
    pipe.load_lora_weights(adapter)
    assert close(diffusers_picture(pipe), ours)


@pytest.mark.parametrize(
    ("weight_name", "prefix"),
    [
        ("pytorch_lora_weights.safetensors", "transformer"),
        ("adapter_model.safetensors", "base_model.model"),
    ],
)
def test_diffusers_load_lora_adapter_by_file_name(ours, adapter, pipe, weight_name, prefix):
    pipe.transformer.load_lora_adapter(adapter, weight_name=weight_name, prefix=prefix)
    assert close(diffusers_picture(pipe), ours)


def test_stock_peft(ours, adapter, pipe, checkpoint):
    base = SD3Transformer2DModel.from_pretrained(checkpoint, subfolder="transformer")
    model = PeftModel.from_pretrained(base, adapter)
    pipe.transformer = model.merge_and_unload()
    assert close(diffusers_picture(pipe), ours)
