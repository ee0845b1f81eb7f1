"""Supervised training on real photos: encoded by workers, cached, and the next epochs read only the cache."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from e2e import metric_rows, run_here, same, start_run, trained_weights
from PIL import Image

from drl.cluster.encoders import EncoderSpec, encode_in_workers
from drl.errors import BadInput, DrlError
from drl.types import Context, MediaFile, Prompt
from drl_family_sd3.tiny import build_random

PHOTOS = """
[model]
checkpoint = "{checkpoint}"
[data]
source = "image_folder"
[data.image_folder]
path = "photos"
[sampling]
width = 48
height = 32
[rollout]
batch_size = 2
[algorithm]
loss = "sft_loss"
[train]
train_only = true
num_rollout = 4
micro_batch_size = 2
[optimizer]
lr = 1e-3
[checkpoint]
save_interval = 4
"""


def shipped_photos() -> list[Path]:
    """Return the two photos that scikit-learn ships; it is found, not imported."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        pytest.skip("scikit-learn, which ships the photos, is not installed")
    folder = Path(found.origin).parent / "datasets" / "images"
    return [folder / "china.jpg", folder / "flower.jpg"]


def write_photos(folder: Path) -> Path:
    """Write the photos and their mirror images, one pair in a folder of its own, with captions."""
    for photo in shipped_photos():
        for name in (photo.name, f"mirrored/{photo.name}"):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.parent == folder:
                shutil.copy(photo, target)
            else:
                with Image.open(photo) as image:
                    image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(target)
            target.with_suffix(".txt").write_text(f"a photo: {name}")
    return folder


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: Path) -> Path:
    write_photos(tmp_path / "photos")
    path = tmp_path / "photos.toml"
    path.write_text(PHOTOS.format(checkpoint=checkpoint))
    return path


def column(run_dir: Path, name: str) -> list[float]:
    return [row[name] for row in metric_rows(run_dir) if name in row]


def test_photos_train_and_the_second_epoch_reads_only_the_cache(
    recipe: Path, tmp_path: Path
) -> None:
    run_here(recipe, tmp_path / "run")
    assert column(tmp_path / "run", "rollout/sft_cache_miss") == [4, 0, 0, 0]
    assert column(tmp_path / "run", "rollout/sft_epoch") == [0, 0, 1, 1]
    assert all(value > 0 for value in column(tmp_path / "run", "train/loss"))
    cache = tmp_path / "photos" / ".sft_cache"
    written = {file.name: file.stat().st_mtime_ns for file in cache.iterdir()}
    assert len(written) == 8
    run_here(recipe, tmp_path / "again")
    assert column(tmp_path / "again", "rollout/sft_cache_miss") == [0, 0, 0, 0]
    assert {file.name: file.stat().st_mtime_ns for file in cache.iterdir()} == written
    assert same(*(trained_weights(tmp_path / name, 4) for name in ("run", "again")))
    assert column(tmp_path / "again", "train/loss") == column(tmp_path / "run", "train/loss")


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(recipe: Path, tmp_path: Path) -> None:
    run_here(recipe, tmp_path / "straight", "checkpoint.save_interval=2")
    run_here(recipe, tmp_path / "run", "checkpoint.save_interval=2", "train.num_rollout=2")
    run_here(recipe, tmp_path / "run", "checkpoint.save_interval=2", resume=True)
    assert same(*(trained_weights(tmp_path / name, 4) for name in ("straight", "run")))
    assert column(tmp_path / "run", "rollout/sft_cache_miss") == [0, 0, 0, 0]


def test_a_worker_writes_what_the_run_itself_would(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(recipe, tmp_path / "here", "train.num_rollout=2")
    cache = tmp_path / "photos" / ".sft_cache"
    plain = {file.name: file.read_bytes() for file in cache.iterdir()}
    shutil.rmtree(cache)
    (tmp_path / "photos" / "torn.jpg").write_bytes(shipped_photos()[0].read_bytes()[:20_000])
    (tmp_path / "photos" / "torn.txt").write_text("torn")
    run_here(
        recipe,
        tmp_path / "there",
        "train.num_rollout=3",
        "data.sft_workers=1",
        "data.on_broken_row=skip",
    )
    assert {file.name: file.read_bytes() for file in cache.iterdir()} == plain
    assert column(tmp_path / "there", "rollout/sft_broken_rows") == [1, 1, 1]
    assert "torn.jpg: cannot be read as an image" in capsys.readouterr().out


def test_an_encoder_checkpoint_that_is_not_there_is_told_at_check_time(
    recipe: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        BadInput, match=r"data\.sft_encoder_checkpoint  there is no folder .*nowhere"
    ):
        run_here(recipe, tmp_path / "run", "data.sft_encoder_checkpoint=./nowhere")
    assert not (tmp_path / "run").exists()


def test_encoders_of_another_checkpoint_give_other_latents(recipe: Path, tmp_path: Path) -> None:
    build_random(tmp_path / "encoders", seed=1)
    sets = ["train.num_rollout=1", "checkpoint.save_interval=1"]
    run_here(recipe, tmp_path / "run", *sets)
    # a path in a recipe starts at the recipe
    text = recipe.read_text().replace("[data]", '[data]\nsft_encoder_checkpoint = "encoders"')
    recipe.write_text(text)
    run_here(recipe, tmp_path / "other", *sets)
    misses = [column(tmp_path / name, "rollout/sft_cache_miss") for name in ("run", "other")]
    assert misses == [[2], [2]]


@pytest.mark.slow
def test_ctrl_c_while_workers_encode_ends_them_and_nothing_is_encoded_twice(
    recipe: Path, tmp_path: Path
) -> None:
    rows = []
    (tmp_path / "many").mkdir()
    for number in range(400):
        shutil.copy(shipped_photos()[0], tmp_path / "many" / f"{number}.jpg")
        rows.append({"file_name": f"{number}.jpg", "text": f"number {number}"})
    (tmp_path / "many" / "metadata.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    settings = [
        f"data.image_folder.path={tmp_path / 'many'}",
        "rollout.batch_size=400",
        "data.sft_workers=2",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    process = start_run(recipe, tmp_path / "run", *words)
    cache = tmp_path / "many" / ".sft_cache"
    wait_for(lambda: len(list(cache.glob("*.latents.safetensors"))) >= 3)
    children = children_of(process.pid)
    assert len(children) >= 2
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "of 400 rows are done and kept" in output
    assert "Traceback" not in output
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    done = {file: file.stat().st_mtime_ns for file in cache.glob("*.safetensors")}
    assert 3 <= len(done) < 800
    assert not list(cache.glob(".*.partial"))


@pytest.mark.slow
def test_a_dead_worker_is_told_and_what_is_encoded_stays(
    recipe: Path, tmp_path: Path, checkpoint: Path
) -> None:
    photos = tmp_path / "photos"
    prompts = (
        Prompt(row=row, text=f"{row}", media=MediaFile(root=photos, name="china.jpg"))
        for row in range(1000)
    )
    spec = EncoderSpec(
        text=recipe.read_text().replace('path = "photos"', f'path = "{photos}"'),
        source="photos.toml",
        context=Context(),
    )
    results = encode_in_workers(prompts, spec, ("cpu",))
    (photos / ".sft_cache").mkdir()
    first = next(outcome for outcome in results if outcome.row is not None)
    assert (first.row, first.broken) == (0, None)
    (worker,) = [child for child in children_of(os.getpid()) if "spawn_main" in command_of(child)]
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(DrlError, match=r"an encoder worker died .*what is encoded already is kept"):
        list(results)
    assert len(list((photos / ".sft_cache").glob("*.latents.safetensors"))) == 1


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started, whatever they are."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
