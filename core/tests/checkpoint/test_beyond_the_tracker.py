"""Checkpoints beyond the tracker: of a run that went back, or that was killed before the tracker moved."""

from __future__ import annotations

import pytest

from drl.checkpoint.folders import checkpoints_in, write_kept, write_tracker
from drl.checkpoint.retention import Retention, prune, why_kept


@pytest.fixture
def root(tmp_path):
    """Folders after iterations 1 to 5."""
    for number in range(1, 6):
        (tmp_path / f"iter_{number:07d}").mkdir()
    return tmp_path


def test_they_stay_and_do_not_count_as_newest(root):
    write_tracker(root, 3)
    assert prune(root, Retention(last=1)) == ["iter_0000002", "iter_0000001"]
    assert list(checkpoints_in(root)) == [3, 4, 5]


def test_each_is_explained(root):
    write_tracker(root, 2)
    write_kept(root, "iter_0000001", "liked")
    why = why_kept(root, Retention(last=1))
    beyond = ["beyond the tracker"]
    assert why == {5: beyond, 4: beyond, 3: beyond, 2: ["newest"], 1: ["kept"]}


def test_they_go_like_any_other_once_the_run_has_passed_them(root):
    write_tracker(root, 5)
    assert prune(root, Retention(last=2)) == ["iter_0000003", "iter_0000002", "iter_0000001"]


def test_without_a_tracker_the_last_one_is_the_newest(root):
    assert prune(root, Retention(last=1)) == [f"iter_{number:07d}" for number in (4, 3, 2, 1)]


def test_without_a_limit_nothing_goes(root):
    write_tracker(root, 1)
    assert prune(root, Retention()) == []
    assert list(checkpoints_in(root)) == [1, 2, 3, 4, 5]
