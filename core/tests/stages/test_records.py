"""Rows of files: encoded once, read from the cache afterwards, told apart by all that decides their content."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from clips import write_clip
from encoding_runs import Settings, encoding_run, image_rows, write_rows
from safetensors.torch import load_file

from drl.errors import BadInput, DataError
from drl.media.fit import Target
from drl.stages.encode import collect_records
from drl.stages.records import checkpoint_facts, latent_seed
from drl.types import Rollout


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return image_rows(tmp_path / "data", 4)


def figures(run: Any, rollouts: int = 2) -> list[float]:
    """Collect rollouts and return how many rows of each were not in the cache."""
    missed = []
    for rollout_id in range(rollouts):
        collect_records(run, rollout_id)
        missed.append(run.row["rollout/sft_cache_miss"])
    return missed


def latents(rollout: Rollout) -> list[torch.Tensor]:
    found = []
    for sample in rollout.samples:
        assert sample.clean is not None
        found.append(sample.clean["visual"])
    return found


def test_the_second_epoch_and_the_second_run_read_only_the_cache(data: Path) -> None:
    run = encoding_run(data)
    first, second, third = (collect_records(run, number) for number in range(3))
    assert len(run.pipeline.media) == 4
    assert run.row["rollout/sft_epoch"] == 1
    assert run.row["rollout/sft_cache_miss"] == 0
    assert [group.prompt.row for group in (*first.groups, *second.groups)] == [1, 2, 3, 4]
    assert all(map(torch.equal, latents(third), latents(first)))
    again = encoding_run(data)
    assert figures(again, 4) == [0, 0, 0, 0]
    assert (again.pipeline.media, again.pipeline.texts) == ([], [])
    assert len(list((data.parent / ".sft_cache").iterdir())) == 8


def test_the_first_iteration_encodes_all_that_the_run_will_draw_and_no_more(data: Path) -> None:
    assert figures(encoding_run(data, Settings(num_rollout=1)), 1) == [2]
    assert figures(encoding_run(data, Settings(num_rollout=50))) == [2, 0]


def test_looking_ahead_leaves_the_source_where_it_was(data: Path) -> None:
    looking, plain = (encoding_run(data, Settings(shuffle=True, seed=3)) for _ in range(2))
    drawn = [prompt.row for prompt in plain.source.take(8)]
    rows = [
        group.prompt.row for number in range(4) for group in collect_records(looking, number).groups
    ]
    assert rows == drawn


def test_conditions_come_back_with_their_values(data: Path) -> None:
    for _ in range(2):
        sample = collect_records(encoding_run(data), 0).samples[1]
        assert sample.condition is not None
        assert sample.condition.tensors["text"].tolist() == [9.0]
        assert dict(sample.condition.values) == {"words": "picture 1"}


@pytest.mark.parametrize(
    ("change", "texts", "media"),
    [
        (Settings(side=2), 0, 4),
        (Settings(tokens=9), 4, 4),
        (Settings(version="1.1"), 4, 4),
        (Settings(dtype="bf16"), 4, 4),
        (Settings(checkpoint="other"), 4, 4),
        (Settings(encoders="other"), 4, 4),
        (Settings(seed=7), 0, 0),
        (Settings(batch=1), 0, 0),
    ],
)
def test_what_decides_the_content_makes_it_anew_and_nothing_else_does(
    data: Path, change: Settings, texts: int, media: int
) -> None:
    figures(encoding_run(data))
    run = encoding_run(data, change)
    figures(run, 4)
    assert (len(run.pipeline.texts), len(run.pipeline.media)) == (texts, media)


def test_a_new_text_costs_no_encoding_of_media_and_a_new_picture_none_of_text(data: Path) -> None:
    figures(encoding_run(data))
    data.write_text(data.read_text().replace("picture 2", "another"))
    (data.parent / "media" / "0.png").write_bytes((data.parent / "media" / "1.png").read_bytes())
    run = encoding_run(data)
    assert figures(run) == [2, 0]
    assert run.pipeline.texts == ["another"]
    assert len(run.pipeline.media) == 1


def test_the_same_content_gives_the_same_latents_wherever_and_whenever_it_lies(
    data: Path, tmp_path: Path
) -> None:
    before = latents(collect_records(encoding_run(data, Settings(seed=1)), 0))
    shutil.copytree(data.parent, tmp_path / "moved", ignore=shutil.ignore_patterns(".sft_cache"))
    os.utime(tmp_path / "moved" / "media" / "0.png", (1, 1))
    moved = encoding_run(tmp_path / "moved" / "data.jsonl", Settings(seed=2))
    assert all(map(torch.equal, latents(collect_records(moved, 0)), before))
    assert len(moved.pipeline.media) == 4


def test_the_seed_of_latents_is_a_number_below_2_to_the_63_of_content_and_size() -> None:
    sizes = [
        Target(height=4, width=4),
        Target(height=4, width=2),
        Target(height=4, width=4, frames=5),
    ]
    seeds = {latent_seed(content, size) for content in ("a", "b") for size in sizes}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert latent_seed("a", sizes[0]) == latent_seed("a", Target(height=4, width=4))


@pytest.mark.parametrize("damage", ["torn", "flipped", "foreign"])
def test_a_damaged_file_is_made_again_and_counted(data: Path, damage: str) -> None:
    before = latents(collect_records(encoding_run(data), 0))
    for file in (data.parent / ".sft_cache").glob("*.latents.safetensors"):
        content = bytearray(file.read_bytes())
        if damage == "torn":
            content = content[: len(content) // 2]
        elif damage == "flipped":
            content[-1] ^= 1
        else:
            content = bytearray(b"something else entirely")
        file.write_bytes(content)
    run = encoding_run(data)
    rollout = collect_records(run, 0)
    assert all(map(torch.equal, latents(rollout), before))
    assert run.row["rollout/sft_cache_miss"] == (2 if damage == "flipped" else 4)
    assert figures(encoding_run(data)) == [0, 2] if damage == "flipped" else [0, 0]


def test_the_cache_may_lie_elsewhere(data: Path, tmp_path: Path) -> None:
    chosen = Settings(cache=tmp_path / "elsewhere" / "cache")
    assert figures(encoding_run(data, chosen)) == [4, 0]
    assert not (data.parent / ".sft_cache").exists()
    assert len(list((tmp_path / "elsewhere" / "cache").iterdir())) == 8
    assert figures(encoding_run(data, chosen)) == [0, 0]


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_encoded(data: Path) -> None:
    (data.parent / ".sft_cache").write_text("in the way")
    run = encoding_run(data)
    with pytest.raises(DataError, match=r"set data\.sft_cache to a folder that can be written"):
        collect_records(run, 0)
    assert run.pipeline.media == []


def test_encoders_come_from_their_own_checkpoint_where_one_is_named(data: Path) -> None:
    run = encoding_run(data, Settings(encoders="encoders"))
    figures(run)
    assert run.asked == ["encoders"]
    plain = encoding_run(data)
    figures(plain)
    assert plain.asked == ["base"]


def test_a_family_without_encoders_is_refused(data: Path) -> None:
    run = encoding_run(data)
    run.family.pipeline = lambda checkpoint, context: None
    with pytest.raises(BadInput, match="'blocks' has no encoders of its own"):
        collect_records(run, 0)


def test_a_checkpoint_is_told_apart_by_its_encoders_files_and_not_by_the_trained_ones(
    tmp_path: Path,
) -> None:
    for name in ("vae/w", "text_encoder/w", "transformer/w", ".cache/x", "index.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    known = checkpoint_facts(str(tmp_path), ["transformer"])
    for name in ("transformer/w", ".cache/x"):
        (tmp_path / name).write_text("other")
    assert checkpoint_facts(str(tmp_path), ["transformer"]) == known
    (tmp_path / "vae" / "w").write_text("other weights")
    assert checkpoint_facts(str(tmp_path), ["transformer"]) != known
    assert checkpoint_facts("owner/name", ["transformer"]) == "owner/name"


def test_frames_of_a_video_become_latents_and_their_rate_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos are read by PyAV")
    write_clip(tmp_path / "clip.mp4", 12, size=(8, 4), rate=8)
    data = write_rows(
        tmp_path / "data.jsonl", [{"input": "clip", "metadata": {"video": "clip.mp4"}}]
    )
    run = encoding_run(data, Settings(batch=1, frames=5, stride=2))
    (clean,) = latents(collect_records(run, 0))
    assert clean.shape == (5, 3, 2, 2)
    (media,) = run.pipeline.media
    assert (tuple(media.pixels.shape), media.kind, media.fps) == ((3, 5, 4, 4), "video", 4.0)
    for other, missed in (
        (Settings(batch=1, frames=5), 1),
        (Settings(batch=1, frames=5, stride=2), 0),
    ):
        assert figures(encoding_run(data, other), 1) == [missed]


def test_a_file_of_the_cache_holds_nothing_but_tensors_and_text(data: Path) -> None:
    figures(encoding_run(data))
    for file in (data.parent / ".sft_cache").glob("*.safetensors"):
        assert load_file(file)


def test_encoders_are_let_go_before_training_and_opened_only_for_what_lacks(data: Path) -> None:
    run = encoding_run(data)
    collect_records(run, 0)
    assert run.asked == ["base"]
    (data.parent / ".sft_cache" / "notes").write_text("kept")
    for file in (data.parent / ".sft_cache").glob("*.text.safetensors"):
        file.unlink()
    collect_records(run, 1)
    assert run.asked == ["base", "base"]
    assert run.row["rollout/sft_cache_miss"] == 2
    complete = encoding_run(data, Settings(num_rollout=2, batch=1))
    complete.source.take(2)
    collect_records(complete, 0)
    assert complete.asked == []


def test_a_cache_of_several_data_sets_keeps_their_files_apart(tmp_path: Path) -> None:
    chosen = Settings(cache=tmp_path / "cache")
    for number, name in enumerate(("one", "other")):
        data = image_rows(tmp_path / name, 2, size=(6 - number, 4 + number))
        for file in (tmp_path / name / "media").iterdir():
            content = file.read_bytes()
            file.write_bytes(content.ljust(200, b"\0"))
            os.utime(file, (1, 1))
        run = encoding_run(data, chosen)
        assert figures(run) == [2, 0]
        assert len(run.pipeline.media) == 2
