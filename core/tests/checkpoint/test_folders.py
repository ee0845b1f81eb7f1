"""Names, tracker and what is offered: a folder has a checkpoint's name only while it is whole."""

from __future__ import annotations

import pytest

from drl.checkpoint.folders import (
    TRACKER,
    checkpoints_in,
    clear_leftovers,
    folder_name,
    good,
    latest,
    number_of,
    read_kept,
    remove_folder,
    replace_folder,
    tracked,
    write_kept,
    write_tracker,
    writing_folder,
)
from drl.checkpoint.manifest import write_manifest
from drl.errors import CheckpointError


def checkpoint(root, number, content="weights"):
    folder = root / folder_name(number)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "data").write_text(content)
    write_manifest(folder)
    write_tracker(root, number)
    return folder


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("iter_0000012", 12),
        ("iter_12345678", 12345678),
        ("iter_12", None),
        ("iter_000001x", None),
        (".writing-iter_0000012-1", None),
        (".deleting-iter_0000012-1", None),
    ],
)
def test_names_and_numbers(tmp_path, name, number):
    assert number_of(tmp_path / name) == number


def test_numbers_beyond_seven_digits_sort_as_numbers(tmp_path):
    for number in (9_999_999, 10_000_000, 2):
        checkpoint(tmp_path, number)
    assert list(checkpoints_in(tmp_path)) == [2, 9_999_999, 10_000_000]


def test_the_tracker_names_the_newest(tmp_path):
    checkpoint(tmp_path, 3)
    newest = checkpoint(tmp_path, 6)
    assert latest(tmp_path) == newest
    assert (tmp_path / TRACKER).read_text() == "6\n"


def test_no_checkpoint_says_how_to_start(tmp_path):
    with pytest.raises(CheckpointError, match="without --resume"):
        latest(tmp_path)


@pytest.mark.parametrize("text", ["three", "", "-1", "1.5", "\xb2"])
def test_a_tracker_with_nonsense_is_named_and_the_good_one_offered(tmp_path, text):
    checkpoint(tmp_path, 3)
    (tmp_path / TRACKER).write_text(text)
    with pytest.raises(CheckpointError, match=r"where an iteration number belongs") as caught:
        latest(tmp_path)
    assert repr(text) in str(caught.value)
    assert f"iter_0000003 is good: write 3 into {tmp_path / TRACKER}" in str(caught.value)


def test_a_tracker_of_a_folder_that_is_gone(tmp_path):
    checkpoint(tmp_path, 3)
    write_tracker(tmp_path, 6)
    with pytest.raises(CheckpointError, match=r"(?s)the folder is missing.*iter_0000003 is good"):
        latest(tmp_path)


@pytest.mark.parametrize("harm", ["flip", "delete", "no_manifest", "bad_manifest", "foreign"])
def test_damage_is_named_and_the_newest_good_one_is_offered(tmp_path, harm):
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 3)
    broken_too = checkpoint(tmp_path, 5)
    (broken_too / "model" / "data").write_text("harmed")
    folder = checkpoint(tmp_path, 6)
    file = folder / "model" / "data"
    if harm == "flip":
        file.write_text("weighty")
    elif harm == "delete":
        file.unlink()
    elif harm == "no_manifest":
        (folder / "manifest.json").unlink()
    elif harm == "foreign":
        (folder / "model" / "more").write_text("")
    else:
        (folder / "manifest.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"(?s)iter_0000006 cannot be used.*iter_0000003 is good"
    ):
        latest(tmp_path)


def test_when_all_are_damaged_it_says_so(tmp_path):
    (checkpoint(tmp_path, 1) / "model" / "data").write_text("harmed")
    assert good(tmp_path).startswith(
        "\nthere is no good checkpoint beside it: --resume cannot go on"
    )


def test_a_folder_of_the_same_name_is_replaced_whole(tmp_path):
    final = tmp_path / "iter_0000001"
    for content in ("old", "new"):
        beside = tmp_path / ".writing"
        beside.mkdir()
        (beside / content).write_text(content)
        replace_folder(beside, final)
    assert [path.name for path in final.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]


def test_a_removed_checkpoint_loses_its_name_first(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path, 3)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(folder)
    assert checkpoints_in(tmp_path) == {}
    assert "no good checkpoint" in good(tmp_path)
    monkeypatch.undo()
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER]


def test_what_killed_writers_left_is_cleared_and_nothing_else(tmp_path):
    folder = checkpoint(tmp_path, 1)
    for name in (".writing-iter_0000002-77", ".old-iter_0000001-77", ".deleting-iter_0000009-1"):
        (tmp_path / name / "model").mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    write_kept(tmp_path, "iter_0000001", "mine")
    clear_leftovers(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([folder.name, "kept.txt", TRACKER, "mine"])


def test_a_folder_that_is_being_written_is_no_checkpoint(tmp_path):
    writing_folder(tmp_path / "iter_0000001").mkdir()
    assert checkpoints_in(tmp_path) == {}
    assert checkpoints_in(tmp_path / "missing") == {}


def test_kept_lines_have_one_reason_each_in_one_line(tmp_path):
    write_kept(tmp_path, "iter_0000001", "first\n  reason")
    write_kept(tmp_path, "iter_0000002", "other")
    write_kept(tmp_path, "iter_0000001", "better")
    assert read_kept(tmp_path) == {"iter_0000002": "other", "iter_0000001": "better"}
    text = (tmp_path / "kept.txt").read_text()
    assert text == "iter_0000002  other\niter_0000001  better\n"


def test_the_tracker_is_read_as_a_number(tmp_path):
    (tmp_path / TRACKER).write_text(" 0000012 \n")
    assert tracked(tmp_path) == 12
