"""Data sets on disk: splits, columns, bytes and names of files, and errors that say what there is."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from clips import write_clip
from datasets import Dataset, DatasetDict, Features, Image, Value, Video
from e2e import metric_rows, run_here
from PIL import Image as Pictures

from drl.api import Context, DataError, MediaFile
from drl.media.fit import Target
from drl.media.reading import check_media, read_media
from drl_data_hf_datasets.config import HfDatasetOptions
from drl_data_hf_datasets.source import HfDatasetSource
from drl_family_sd3.tiny import build_random


def png(grey: int) -> bytes:
    buffer = BytesIO()
    Pictures.fromarray(np.full((4, 6, 3), grey, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def images(count: int = 4, **more: Any) -> Dataset:
    rows = {
        "text": [f"grey {n}" for n in range(count)],
        "image": [{"bytes": png(10 * n), "path": None} for n in range(count)],
    }
    features = Features({"text": Value("string"), "image": Image()})
    return Dataset.from_dict(rows | more, features=None if more else features)


def source(path: Path, on_broken_row: str = "refuse", **options: Any) -> HfDatasetSource:
    context = Context(seed=1, section=SimpleNamespace(on_broken_row=on_broken_row))
    return HfDatasetSource(HfDatasetOptions(path=path, **options), context)


def test_images_come_as_the_bytes_that_lie_there(tmp_path: Path) -> None:
    images().save_to_disk(tmp_path / "set")
    prompts = source(tmp_path / "set", shuffle=False).take(5)
    assert [prompt.text for prompt in prompts] == [*(f"grey {n}" for n in range(4)), "grey 0"]
    assert [(prompt.row, prompt.epoch) for prompt in prompts[2:]] == [(2, 0), (3, 0), (0, 1)]
    for number, prompt in enumerate(prompts[:4]):
        assert isinstance(prompt.media, MediaFile)
        assert (prompt.media.content, prompt.media.root) == (png(10 * number), tmp_path / "set")
        pixels = read_media(prompt.media, Target(height=4, width=6)).pixels
        assert round(float(pixels.max()) * 255) == 10 * number
    versions = {prompt.media.version for prompt in prompts if isinstance(prompt.media, MediaFile)}
    assert len(versions) == 4


def test_a_split_is_named_or_the_only_one(tmp_path: Path) -> None:
    both = DatasetDict({"train": images(3), "test": images(2)})
    both.save_to_disk(tmp_path / "both")
    assert source(tmp_path / "both", split="test").rows() == 2
    with pytest.raises(
        DataError, match=r"split is not set, but .* has the splits train, test; name"
    ):
        source(tmp_path / "both")
    with pytest.raises(DataError, match=r"split is 'dev', but .* has the splits train, test"):
        source(tmp_path / "both", split="dev")
    assert source(tmp_path / "both" / "train").rows() == 3
    with pytest.raises(DataError, match=r"holds one split .*; leave the option out"):
        source(tmp_path / "both" / "train", split="test")
    DatasetDict({"train": images(3)}).save_to_disk(tmp_path / "one")
    assert source(tmp_path / "one").rows() == 3


@pytest.mark.parametrize("exists", [True, False])
def test_what_is_no_data_set_is_refused(tmp_path: Path, exists: bool) -> None:
    path = tmp_path if exists else tmp_path / "nowhere"
    with pytest.raises(DataError, match=r"data\.hf_dataset\.path: .* is not a data set that"):
        source(path)


def test_names_of_files_start_at_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(png(90))
    Dataset.from_dict({"caption": ["a"], "file": ["a.png"]}).save_to_disk(tmp_path / "set")
    (prompt,) = source(tmp_path / "set", text_column="caption", image_column="file").take(1)
    assert isinstance(prompt.media, MediaFile)
    assert (prompt.media.name, prompt.media.content) == ("a.png", None)
    check_media(prompt.media, Target(height=4, width=4))


def test_videos_of_a_column_are_read(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos are read by PyAV")
    clip = write_clip(tmp_path / "clip.mp4", 9)
    rows = {"text": ["a clip"], "clip": [{"bytes": clip.path.read_bytes(), "path": "clip.mp4"}]}
    features = Features({"text": Value("string"), "clip": Video(decode=False)})
    Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "set")
    (prompt,) = source(tmp_path / "set").take(1)
    assert isinstance(prompt.media, MediaFile)
    assert (prompt.media.kind, prompt.media.name) == ("video", "row 0 (clip.mp4)")
    media = read_media(prompt.media, Target(height=8, width=8, frames=5, stride=2))
    assert (tuple(media.pixels.shape), media.fps) == ((3, 5, 8, 8), 4.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"text_column": "caption"},
            "text_column: there is no column 'caption'; it has: text, image",
        ),
        ({"text_column": "number"}, "text_column: column 'number' does not hold text"),
        ({"image_column": "images"}, "image_column: there is no column 'images'"),
        ({"video_column": "image"}, "video_column: column 'image' holds no video"),
        ({"image_column": "image", "video_column": "text"}, "are both given"),
    ],
)
def test_columns_that_do_not_fit_are_told_with_those_there_are(
    tmp_path: Path, options: dict[str, str], words: str
) -> None:
    images(2).add_column("number", [1, 2]).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match=words):
        source(tmp_path / "set", **options)


def test_without_a_column_of_media_or_with_two_one_must_be_named(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["a"], "file": ["a.png"]}).save_to_disk(tmp_path / "none")
    with pytest.raises(DataError, match=r"videos: none; all columns: text, file"):
        source(tmp_path / "none")
    two = images(2).rename_column("image", "one")
    two = datasets.concatenate_datasets([two, images(2).select_columns(["image"])], axis=1)
    two.save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=r"one \(image\), image \(image\); all columns"):
        source(tmp_path / "two")
    assert source(tmp_path / "two", image_column="one").rows() == 2


def test_rows_without_text_are_refused_or_skipped_by_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"text": ["a", "", None, "d"], "file": ["a.png"] * 4}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "set")
    with pytest.raises(DataError, match=r"has 2 rows without text, such as \[1, 2\]; remove them"):
        source(tmp_path / "set", image_column="file")
    with caplog.at_level("WARNING", logger="drl_data_hf_datasets"):
        skipping = source(tmp_path / "set", "skip", image_column="file", shuffle=False)
    assert "2 rows without text, such as [1, 2], which are skipped" in caplog.text
    assert ([prompt.row for prompt in skipping.take(3)], skipping.skipped) == ([0, 3, 0], (1, 2))


def test_a_row_without_media_has_none(tmp_path: Path) -> None:
    rows = {"text": ["a", "b"], "file": [None, "b.png"]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "set")
    first, second = source(tmp_path / "set", image_column="file", shuffle=False).take(2)
    assert first.media is None
    assert second.media is not None


def test_another_data_set_is_not_resumed(tmp_path: Path) -> None:
    images(3).save_to_disk(tmp_path / "set")
    images(4).save_to_disk(tmp_path / "other")
    state = source(tmp_path / "set").state()
    with pytest.raises(DataError, match="are not those of the saved run"):
        source(tmp_path / "other").restore(state)
    with pytest.raises(DataError, match="are not those of the saved run"):
        source(tmp_path / "set", shuffle=False).restore(state)


def test_a_run_trains_on_it_and_the_second_epoch_reads_only_the_cache(
    tmp_path: Path,
) -> None:
    build_random(tmp_path / "tiny-sd3", seed=0)
    images(4).save_to_disk(tmp_path / "set")
    recipe = tmp_path / "set.toml"
    recipe.write_text(RECIPE)
    run_here(recipe, tmp_path / "run")
    rows = metric_rows(tmp_path / "run")
    assert [row["rollout/sft_cache_miss"] for row in rows] == [4, 0, 0]
    assert [row["rollout/sft_epoch"] for row in rows] == [0, 0, 1]
    assert len(list((tmp_path / "set" / ".sft_cache").iterdir())) == 8


RECIPE = """
[model]
checkpoint = "tiny-sd3"
[data]
source = "hf_dataset"
[data.hf_dataset]
path = "set"
[sampling]
width = 32
height = 32
[rollout]
batch_size = 2
[algorithm]
loss = "sft_loss"
[train]
train_only = true
num_rollout = 3
micro_batch_size = 2
[checkpoint]
save_interval = 3
"""
