"""Tiny pipelines: complete, reproducible, loadable, and silent about the global random state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from drl_family_sd3 import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "pipeline"
    tiny.build_random(directory, seed=3)
    return directory


def weights_of(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def test_random_pipeline_loads_and_paints(folder: Path) -> None:
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        "a cat",
        height=32,
        width=64,
        num_inference_steps=2,
        max_sequence_length=16,
        guidance_scale=3.0,
        output_type="pt",
    ).images
    assert images.shape == (1, 3, 32, 64)
    assert torch.isfinite(images).all()


def test_random_pipeline_is_small(folder: Path) -> None:
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True)
    assert sum(p.numel() for p in pipeline.transformer.parameters()) < 100_000
    assert sum(len(content) for content in weights_of(folder).values()) < 2_000_000


def test_same_seed_gives_same_bytes_and_another_does_not(folder: Path, tmp_path: Path) -> None:
    tiny.build_random(tmp_path / "again", seed=3)
    tiny.build_random(tmp_path / "other", seed=4)
    assert weights_of(tmp_path / "again") == weights_of(folder)
    assert weights_of(tmp_path / "other") != weights_of(folder)


def test_building_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    tiny.build_random(tmp_path / "random", seed=5)
    tiny.build_glyphs(tmp_path / "glyphs", seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_tokenizers_survive_saving(tmp_path: Path) -> None:
    for tokenizer in (tiny.clip_tokenizer(10, ["sign"]), tiny.t5_tokenizer(10, ["sign"])):
        kind = type(tokenizer)
        tokenizer.save_pretrained(tmp_path / kind.__name__)
        again = kind.from_pretrained(tmp_path / kind.__name__)
        tokens = tokenizer('sign "WIND"', padding="max_length").input_ids
        assert again('sign "WIND"', padding="max_length").input_ids == tokens
        assert len(tokens) == 10


def clip_letters(pipeline: StableDiffusion3Pipeline, *words: str) -> torch.Tensor:
    """The conditioning ``[words, 4, width]`` that the CLIP encoders give for each letter."""
    states = pipeline.encode_prompt(
        [f'sign "{word}"' for word in words],
        None,
        None,
        do_classifier_free_guidance=False,
        max_sequence_length=tiny.GLYPHS.tokens,
    )[0]
    return states[:, 3:7]


def test_glyph_prompts_differ_only_where_letters_do() -> None:
    letters = clip_letters(tiny.glyph_pipeline(seed=0), "WIND", "WINK")
    differs = (letters[0] - letters[1]).abs().amax(dim=-1) > 1e-3
    assert differs.tolist() == [False, False, False, True]
    assert 0.5 < letters.std() < 2.0


def test_a_letter_adds_the_same_at_every_place() -> None:
    wind, dink, ninw = clip_letters(tiny.glyph_pipeline(seed=0), "WIND", "DINK", "NINW")
    torch.testing.assert_close(wind[0] - dink[0], ninw[3] - wind[3])
