"""Text, sigma tables, first latents and VAE, against diffusers and golden tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from drl.api import BadInput, Context, Media, Sampling
from drl.testing.golden import load_golden
from drl_family_sd3.checkpoint import load_part
from drl_family_sd3.config import Sd3Options
from drl_family_sd3.pipeline import Sd3Pipeline, Sizes

PROMPTS = ["a sign", 'a sign "WIND"', "", " ", "one prompt that is longer than sixteen tokens are"]
SMALL = Sampling(num_steps=4, height=32, width=48)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def edited(checkpoint: str, tmp_path: Path, part: str, **changes: Any) -> str:
    """Copy a checkpoint and change the config of one part."""
    copy = tmp_path / "edited"
    shutil.copytree(checkpoint, copy)
    names = {"scheduler": "scheduler_config.json", "": "model_index.json"}
    path = copy / part / names.get(part, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(copy)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_is_encoded_as_diffusers_does(
    pipeline: Sd3Pipeline, checkpoint: str, prompt: str
) -> None:
    stock = StableDiffusion3Pipeline.from_pretrained(checkpoint)
    stock.text_encoder_3.set_attn_implementation("eager")  # as the sglang server computes it
    with torch.no_grad():
        text, _, pooled, _ = stock.encode_prompt(
            prompt, prompt, prompt, do_classifier_free_guidance=False, max_sequence_length=16
        )
    (record,) = pipeline.encode_text([prompt])
    assert torch.equal(record.tensors["encoder_hidden_states"], text[0])
    assert torch.equal(record.tensors["pooled_projections"], pooled[0])


def test_without_t5_its_tokens_are_zeros(checkpoint: str, tmp_path: Path) -> None:
    bare = edited(checkpoint, tmp_path, "", text_encoder_3=[None, None], tokenizer_3=[None, None])
    pipeline = Sd3Pipeline(bare, Sd3Options.model_validate({"t5_tokens": 5}), Context())
    (record,) = pipeline.encode_text(["a sign"])
    assert record.tensors["encoder_hidden_states"].shape == (16 + 5, 32)
    assert float(record.tensors["encoder_hidden_states"][16:].abs().max()) == 0.0


def test_without_clip_a_pipeline_is_refused(checkpoint: str, tmp_path: Path) -> None:
    bare = edited(checkpoint, tmp_path, "", text_encoder=[None, None])
    with pytest.raises(BadInput, match="has no text_encoder;"):
        Sd3Pipeline(bare, Sd3Options.model_validate({}), Context())


def test_a_pipeline_of_another_model_is_refused(checkpoint: str, tmp_path: Path) -> None:
    other = edited(checkpoint, tmp_path, "", transformer=["diffusers", "FluxTransformer2DModel"])
    with pytest.raises(BadInput, match="has FluxTransformer2DModel as transformer"):
        Sd3Pipeline(other, Sd3Options.model_validate({}), Context())


def test_a_folder_without_model_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no model_index\.json"):
        Sd3Pipeline(str(tmp_path), Sd3Options.model_validate({}), Context())


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read model_index\.json of .*nowhere"):
        Sd3Pipeline(str(tmp_path / "nowhere"), Sd3Options.model_validate({}), Context())


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_weights_that_lack_a_tensor_are_refused(checkpoint: str, tmp_path: Path, part: str) -> None:
    copy = edited(checkpoint, tmp_path, "")
    path = Path(copy) / part / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    lost = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, path)
    with pytest.raises(BadInput, match=f"weights of {part} in .* lack 1 tensors .*{lost}"):
        load_part(copy, part, dtype="fp32", device="cpu")


def test_the_cache_of_prompts_is_bounded_and_keeps_the_latest(checkpoint: str) -> None:
    pipeline = Sd3Pipeline(checkpoint, Sd3Options.model_validate({"prompt_cache": 2}), Context())
    first, _ = pipeline.encode_text(["a", "b"])
    assert pipeline.encode_text(["a"])[0] is first
    pipeline.encode_text(["c"])
    assert list(pipeline.text.latest) == ["a", "c"]
    assert pipeline.encode_text(["a"])[0] is first


def golden_rows(family: str) -> list[dict[str, Any]]:
    return [case for case in load_golden("sigma_tables")["cases"] if case["family"] == family]


@pytest.mark.parametrize("place", range(12))
def test_static_tables_are_those_of_diffusers(pipeline: Sd3Pipeline, place: int) -> None:
    case = golden_rows("flow_match_euler_static")[place]
    shift, steps = case["config"]["shift"], case["steps"]
    sampling = Sampling(num_steps=steps, height=32, width=32, flow_shift=shift)
    assert torch.equal(pipeline.sigmas(sampling), torch.tensor(case["sigmas"]))
    assert torch.equal(pipeline.timesteps(sampling), torch.tensor(case["timesteps"]))


def test_dynamic_tables_follow_the_picture_size(checkpoint: str, tmp_path: Path) -> None:
    cases = golden_rows("sd3_dynamic")
    folder = edited(checkpoint, tmp_path, "scheduler", **cases[0]["config"])
    pipeline = Sd3Pipeline(folder, Sd3Options.model_validate({}), Context())
    pipeline.sizes = Sizes(channels=4, factor=8, patch=2, largest=512)
    for case in cases:
        side = 16 * round(case["image_seq_len"] ** 0.5)
        sampling = Sampling(num_steps=case["steps"], height=side, width=side)
        expected = torch.tensor(case["sigmas"])
        assert torch.allclose(pipeline.sigmas(sampling), expected, rtol=0, atol=2e-7)


def test_a_shift_that_would_be_ignored_is_refused(checkpoint: str, tmp_path: Path) -> None:
    folder = edited(checkpoint, tmp_path, "scheduler", use_dynamic_shifting=True)
    pipeline = Sd3Pipeline(folder, Sd3Options.model_validate({}), Context())
    with pytest.raises(BadInput, match=r"sampling\.flow_shift"):
        pipeline.sigmas(Sampling(num_steps=4, height=32, width=32, flow_shift=3.0))


def test_initial_latents_are_one_draw_of_the_generator(pipeline: Sd3Pipeline) -> None:
    drawn = pipeline.initial(SMALL, seeded(7))["visual"]
    assert torch.equal(drawn, torch.randn((1, 4, 16, 24), generator=seeded(7))[0])


@pytest.mark.parametrize(
    ("height", "width", "frames", "message"),
    [
        (33, 32, 1, r"sampling\.height: 33 is no multiple of 4 .*use 32 or 36"),
        (32, 2, 1, r"sampling\.width: 2 is no multiple of 4 .*use 4 or 8"),
        (32, 80, 1, r"sampling\.width: 80 is above 64"),
        (32, 32, 5, r"sampling\.num_frames"),
    ],
)
def test_a_size_that_does_not_fit_names_its_option(
    pipeline: Sd3Pipeline, height: int, width: int, frames: int, message: str
) -> None:
    sampling = Sampling(num_steps=4, height=height, width=width, num_frames=frames)
    with pytest.raises(BadInput, match=message):
        pipeline.initial(sampling, seeded(0))


def latents(rows: int) -> Tensor:
    return torch.randn(rows, 4, 16, 24, generator=seeded(3))


def test_a_decoded_picture_does_not_depend_on_its_neighbours(pipeline: Sd3Pipeline) -> None:
    rows = latents(7)
    together = pipeline.decode({"visual": rows})
    for i in range(7):
        (alone,) = pipeline.decode({"visual": rows[i : i + 1]})
        assert torch.equal(alone.pixels, together[i].pixels)


def test_decoding_is_the_vae_of_diffusers(pipeline: Sd3Pipeline) -> None:
    rows = latents(4)
    with torch.no_grad():
        image = pipeline.vae.decode(rows / pipeline.scale + pipeline.shift).sample
    decoded = torch.stack([media.pixels[:, 0] for media in pipeline.decode({"visual": rows})])
    assert torch.equal(decoded, (image / 2 + 0.5).clamp(0, 1))


def test_large_pictures_are_decoded_in_tiles_when_asked(checkpoint: str, tmp_path: Path) -> None:
    folder = edited(checkpoint, tmp_path, "vae", sample_size=16)
    whole, tiled = (
        Sd3Pipeline(
            folder, Sd3Options.model_validate({"decode_rows": 1, "tiled_decode": on}), Context()
        ).decode({"visual": latents(1)})[0]
        for on in (False, True)
    )
    assert whole.pixels.shape == tiled.pixels.shape == (3, 1, 32, 48)
    assert not torch.equal(whole.pixels, tiled.pixels)


def test_encoding_draws_from_the_posterior(pipeline: Sd3Pipeline) -> None:
    pixels = torch.rand(3, 1, 32, 48, generator=seeded(1))
    encoded = pipeline.encode_media(Media(pixels=pixels), seeded(2))["visual"]
    with torch.no_grad():
        posterior = pipeline.vae.encode(2 * pixels[:, 0][None] - 1).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=seeded(2))
    expected = (posterior.mean + posterior.std * noise - pipeline.shift) * pipeline.scale
    assert torch.equal(encoded, expected[0])


def test_a_clip_is_no_picture(pipeline: Sd3Pipeline) -> None:
    with pytest.raises(BadInput, match=r"got \(3, 2, 32, 32\)"):
        pipeline.encode_media(Media(pixels=torch.zeros(3, 2, 32, 32)), seeded(0))
