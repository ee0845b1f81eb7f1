"""A disk without room: the save that fails says so, what was there before stays, nothing half-written counts."""

from __future__ import annotations

import os

import pytest
from e2e import checkpoint_folder, metric_rows, run_here, same, set_words, trainer_state

from drl.checkpoint import damage
from drl.checkpoint.folders import TRACKER
from drl.errors import DrlError, RunDirectoryError

STRANGERS = ()
QUIET = ("eval.datasets=[]", "checkpoint.save_interval=1")
ROOM = 100_000
"""Bytes per file: room for metrics, pictures and the report, not for the optimizer's state."""


@pytest.fixture
def limited(zygote, recipe):
    """Run in a process whose files cannot grow beyond ROOM; give its exit code and what it printed."""

    def ended(run_dir, *sets, words=()):
        command = ["run", str(recipe), "--run-dir", str(run_dir), *words, *set_words(sets)]
        child = zygote.start(command, run_dir, room=ROOM)
        return child.wait(), child.output

    return ended


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_the_checkpoint_before_stays_and_the_run_goes_on_from_it(
    recipe, limited, tmp_path, asynchronous
):
    run_dir = tmp_path / "run"
    run_here(recipe, run_dir, "train.num_rollout=1", *QUIET)
    more = ("train.num_rollout=3", *QUIET, f"checkpoint.asynchronous={asynchronous}")
    code, printed = limited(run_dir, *more, words=("--resume",))
    assert code == 1, printed
    assert "checkpoint iter_0000002 could not be written: " in printed
    assert "File too large" in printed
    assert "untouched; make room there, then go on with --resume" in printed
    assert "Traceback" not in printed
    assert names(run_dir) == ["iter_0000001", TRACKER]
    assert (run_dir / "checkpoints" / TRACKER).read_text() == "1\n"
    assert damage(checkpoint_folder(run_dir, 1)) is None
    run_here(recipe, run_dir, *more, resume=True)
    run_here(recipe, tmp_path / "straight", "train.num_rollout=3", *QUIET)
    assert same(trainer_state(run_dir, 3), trainer_state(tmp_path / "straight", 3))
    assert [row["step"] for row in metric_rows(run_dir)] == [0, 1, 2]


def test_a_first_save_that_fails_leaves_no_checkpoint_at_all(limited, tmp_path):
    run_dir = tmp_path / "run"
    code, printed = limited(run_dir, "train.num_rollout=1", *QUIET)
    assert code == 1, printed
    assert "checkpoint iter_0000001 could not be written: " in printed
    assert "Traceback" not in printed
    assert names(run_dir) == []


def test_a_checkpoints_folder_that_cannot_be_made_is_an_error_of_the_save(recipe, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DrlError, match=r"iter_0000001 could not be written: .*Not a directory"):
        run_here(
            recipe,
            tmp_path / "run",
            "train.num_rollout=1",
            *QUIET,
            f"checkpoint.save={tmp_path / 'file' / 'checkpoints'}",
        )
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_error_of_the_save(recipe, tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    with pytest.raises(DrlError, match=r"could not be written: .*Permission denied"):
        run_here(recipe, tmp_path / "run", *QUIET, f"checkpoint.save={folder}")
    assert list(folder.iterdir()) == []


def test_a_run_directory_that_cannot_be_made_says_so_before_anything_runs(recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot write in"):
        run_here(recipe, tmp_path / "file" / "run", *QUIET)
