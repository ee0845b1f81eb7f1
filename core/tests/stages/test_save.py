"""Checkpoints on disk: manifest, damage, tracker, what is offered instead."""

from __future__ import annotations

import json

import pytest

from drl.errors import CheckpointError
from drl.stages.save import TRACKER, damage, latest, replace_folder, write_manifest


def checkpoint(root, number, content="weights"):
    folder = root / f"iter_{number:07d}"
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "model.safetensors").write_text(content)
    (folder / "run.json").write_text("{}")
    write_manifest(folder)
    (root / TRACKER).write_text(f"{number}\n")
    return folder


def test_the_tracker_names_the_newest(tmp_path):
    checkpoint(tmp_path, 3)
    newest = checkpoint(tmp_path, 6)
    assert latest(tmp_path) == newest


def test_the_manifest_covers_every_file(tmp_path):
    folder = checkpoint(tmp_path, 1)
    names = json.loads((folder / "manifest.json").read_text())
    assert sorted(names) == ["run.json", "trainer/model.safetensors"]
    assert damage(folder) is None


def test_no_checkpoint_says_how_to_start(tmp_path):
    with pytest.raises(CheckpointError, match="without --resume"):
        latest(tmp_path)


@pytest.mark.parametrize("harm", ["flip", "delete", "no_manifest", "bad_manifest"])
def test_damage_is_named_and_the_good_one_before_is_offered(tmp_path, harm):
    checkpoint(tmp_path, 3)
    folder = checkpoint(tmp_path, 6)
    file = folder / "trainer" / "model.safetensors"
    if harm == "flip":
        file.write_text("weighty")
    elif harm == "delete":
        file.unlink()
    elif harm == "no_manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"(?s)iter_0000006 cannot be used.*iter_0000003 is good"
    ):
        latest(tmp_path)


def test_a_tracker_with_nonsense_is_named(tmp_path):
    checkpoint(tmp_path, 3)
    (tmp_path / TRACKER).write_text("three")
    with pytest.raises(CheckpointError, match="'three'"):
        latest(tmp_path)


def test_a_folder_of_the_same_name_is_replaced_whole(tmp_path):
    final = tmp_path / "iter_0000001"
    for content in ("old", "new"):
        beside = tmp_path / ".writing"
        beside.mkdir()
        (beside / content).write_text(content)
        replace_folder(beside, final)
    assert [path.name for path in final.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]
