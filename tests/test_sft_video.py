"""Supervised training on real short videos, by a real video VAE and transformer of random weights."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from clips import write_clip
from e2e import metric_rows, run_here
from encoding_runs import write_rows
from safetensors.torch import load_file
from third_party_plugins import installed

from drl.catalog import Catalog
from drl.errors import DataError, RecipeError
from drl.media.fit import Target
from drl.media.reading import read_media
from drl.types import MediaFile

pytest.importorskip("av", reason="videos are read by PyAV")

RECIPE = """
[model]
checkpoint = "tiny-wan"
[data]
prompt_data = "clips.jsonl"
sft_frame_stride = 2
[sampling]
width = 32
height = 32
num_frames = 5
[rollout]
batch_size = 2
[algorithm]
loss = "sft_loss"
[algorithm.sft_loss]
flow_shift = 3.0
[train]
train_only = true
num_rollout = 4
micro_batch_size = 2
[optimizer]
lr = 1e-2
[checkpoint]
save_interval = 4
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the family installed, its tiny checkpoint, three clips and a recipe."""
    folder = tmp_path_factory.mktemp("video")
    with installed(folder / "site", "acme-wan"):
        Catalog.load()
        importlib.import_module("acme_wan_family").build_wan(folder / "tiny-wan")
        write_clip(folder / "clips" / "a.mp4", 12, size=(64, 48))
        write_clip(folder / "clips" / "b.webm", 9, size=(32, 32), codec="libvpx-vp9")
        write_clip(folder / "clips" / "c.mkv", 30, size=(96, 32), rate=Fraction(24))
        rows = [
            {"input": f"clip {name[0]}", "metadata": {"video": f"clips/{name}"}}
            for name in ("a.mp4", "b.webm", "c.mkv")
        ]
        write_rows(folder / "clips.jsonl", rows)
        (folder / "video.toml").write_text(RECIPE)
        yield folder


def test_videos_train_and_the_second_epoch_reads_only_the_cache(lab: Path, tmp_path: Path) -> None:
    shutil.rmtree(lab / ".sft_cache", ignore_errors=True)  # of tests before this one
    run_here(lab / "video.toml", tmp_path / "run")
    rows = metric_rows(tmp_path / "run")
    assert [row["rollout/sft_cache_miss"] for row in rows] == [3, 0, 0, 0]
    assert [row["rollout/sft_epoch"] for row in rows] == [0, 1, 1, 2]
    assert all(row["train/loss"] > 0 and row["train/grad_norm"] > 0 for row in rows)
    files = sorted((lab / ".sft_cache").glob("*.latents.safetensors"))
    assert len(files) == 3
    # 5 frames are 1 + 4 / 4 latent frames, 32 pixels 4 latents
    assert {tuple(load_file(file)["visual"].shape) for file in files} == {(4, 2, 4, 4)}
    run_here(lab / "video.toml", tmp_path / "again", "data.sft_frame_stride=1")
    assert metric_rows(tmp_path / "again")[0]["rollout/sft_cache_miss"] == 3


def test_the_latents_are_those_of_the_used_frames(lab: Path, tmp_path: Path) -> None:
    run_here(lab / "video.toml", tmp_path / "run", f"data.sft_cache={tmp_path / 'cache'}")
    family = importlib.import_module("acme_wan_family")
    pipeline = family.WanPipeline(lab / "tiny-wan")
    target = Target(height=32, width=32, frames=5, stride=2)
    found = [load_file(file)["visual"] for file in (tmp_path / "cache").glob("*.latents.*")]
    for name in ("a.mp4", "b.webm", "c.mkv"):
        media = read_media(MediaFile(root=lab / "clips", name=name, kind="video"), target)
        with torch.no_grad():
            posterior = pipeline.vae.encode(2 * media.pixels[None] - 1).latent_dist
        mean = posterior.mean[0]
        shift, scale = pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std
        distances = []
        for latents in found:
            raw = [latents[c] * scale[c] + shift[c] for c in range(4)]
            off = [(raw[c] - mean[c]) / posterior.std[0, c] for c in range(4)]
            distances.append(max(float(one.abs().max()) for one in off))
        # noise of 128 draws stays within 5 standard deviations of the file's own mean
        assert min(distances) < 5


def test_clips_too_short_for_the_stride_are_told_by_row(
    lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stride = "data.sft_frame_stride=3"
    short = "but sampling.num_frames = 5 at data.sft_frame_stride = 3 needs 13"
    with pytest.raises(DataError, match=rf"\n  row 1: clips/a\.mp4: has 12 frames, {short}\n"):
        run_here(lab / "video.toml", tmp_path / "run", stride)
    run_here(lab / "video.toml", tmp_path / "skip", stride, "data.on_broken_row=skip")
    # the head of a WebM does not say how many frames follow
    assert f"  row 2: clips/b.webm: has 9 frames, {short}" in capsys.readouterr().out
    rows = metric_rows(tmp_path / "skip")
    assert [row["rollout/sft_broken_rows"] for row in rows] == [2, 2, 2, 2]
    assert [row["rollout/sft_epoch"] for row in rows] == [1, 3, 5, 7]


def test_a_number_of_frames_that_the_model_cannot_encode_is_refused(
    lab: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match="needs 4 k \\+ 1 frames"):
        run_here(lab / "video.toml", tmp_path / "run", "sampling.num_frames=4")
