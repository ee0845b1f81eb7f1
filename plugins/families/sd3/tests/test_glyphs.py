"""The glyphs base model: its words, its pictures, its VAE and its build command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from drl_family_sd3 import tiny
from drl_family_sd3.glyphs import build, render, vae, words
from drl_family_sd3.glyphs.__main__ import main


def test_word_lists_are_large_and_disjoint() -> None:
    lists = [set(words.rl_words()), set(words.dev_words()), set(words.test_words())]
    assert [len(one) >= least for one, least in zip(lists, (50, 64, 96), strict=True)] == [True] * 3
    assert len(set.union(*lists)) == sum(map(len, lists))


def test_random_strings_avoid_every_word_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "LETTERS", "ABEL")
    drawn = words.random_strings(2000, torch.Generator().manual_seed(0))
    assert len(drawn) == 2000
    assert "LALA" in drawn
    assert not set(drawn) & {"ABLE", "BALL", "BELL"}


def test_random_strings_depend_on_the_generator_alone() -> None:
    first, again, other = (
        words.random_strings(5, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_bad_word_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("GOOD\nlower\n")
    monkeypatch.setattr(words.resources, "files", lambda _: tmp_path)
    with pytest.raises(ValueError, match=r"mine\.txt.*lower.*Correct that file"):
        words._word_list("mine")


def test_render_has_dark_ink_in_every_cell() -> None:
    picture = np.asarray(render.render("WIND", ink=0))
    assert picture.shape == (16, 48, 3)
    assert all(picture[:, 12 * i : 12 * (i + 1)].min() < 60 for i in range(4))
    assert picture[0].min() == picture[15].min() == 255


def test_render_batch_is_reproducible_and_in_range() -> None:
    def batch() -> torch.Tensor:
        return render.render_batch(["WIND", "MOON"] * 3, torch.Generator().manual_seed(0))

    pixels = batch()
    assert pixels.shape == (6, 3, 16, 48)
    assert pixels.dtype == torch.float32
    assert pixels.min() >= -1.0
    assert pixels.max() == 1.0
    assert torch.equal(pixels, batch())
    assert not torch.equal(pixels[0], pixels[2])


def test_training_pictures_are_out_of_focus_by_different_amounts() -> None:
    pixels = render.render_batch(["WIND"] * 64, torch.Generator().manual_seed(0))
    steepest = pixels.diff(dim=-1).abs().amax(dim=(1, 2, 3))
    assert steepest.max() > 1.0
    assert steepest.min() < 0.3


def test_two_vae_steps_change_weights_and_normalize_latents() -> None:
    with tiny.seeded(0):
        model = tiny.vae(tiny.GLYPHS)
    before = model.decoder.conv_in.weight.detach().clone()
    state = torch.get_rng_state()
    seen: list[int] = []
    vae.train_vae(model, seed=0, steps=2, pictures=64, report=lambda step, *_: seen.append(step))
    assert seen == [1, 2]
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(model.decoder.conv_in.weight, before)
    pixels = render.render_batch(["WIND"] * 8, torch.Generator().manual_seed(0))
    latents = model.encode(pixels).latent_dist.mean
    scaled = (latents - model.config.shift_factor) * model.config.scaling_factor
    assert latents.shape == (8, 4, 8, 24)
    assert abs(scaled.mean()) < 0.2
    assert 0.8 < scaled.std() < 1.2


def test_build_command_writes_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae, "PICTURES", 64)
    main(["build", str(tmp_path / "glyphs"), "--vae-steps", "2"])
    assert "ETA" in capsys.readouterr().out
    config = json.loads((tmp_path / "glyphs" / "vae" / "config.json").read_text())
    assert config["scaling_factor"] != 1.0
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "glyphs", local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        words.prompt_of("WIND"),
        height=16,
        width=48,
        num_inference_steps=2,
        max_sequence_length=10,
        guidance_scale=0.0,
    ).images[0]
    assert image.size == (48, 16)


def test_build_refuses_a_file_as_directory(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(NotADirectoryError, match="taken is a file"):
        build.build(tmp_path / "taken", say=print)
