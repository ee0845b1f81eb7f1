from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from drl.errors import BadInput, DrlError, RankError, RunDirectoryError
from drl.lora import LoraError
from drl.observe.directory import RunDirectory, is_run_directory, never_began

HOLDER = """
import sys, time
from pathlib import Path
from drl.observe.directory import RunDirectory
with RunDirectory.open(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Start a process that holds the lock until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("done\n", timeout=10)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path, "glyphs")
    directory.recipe.write_text("")
    return directory


def test_the_folder_is_named_after_the_run_and_the_local_second(tmp_path: Path) -> None:
    now = time.mktime((2026, 3, 4, 5, 6, 7, 0, 0, -1))
    directory = RunDirectory.create(tmp_path / "runs", "glyphs", now=now)
    assert directory.path == tmp_path / "runs" / "glyphs-20260304-050607"
    assert directory.name == "glyphs-20260304-050607"
    assert directory.path.is_dir()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    names: list[str] = []

    def make() -> None:
        names.append(RunDirectory.create(tmp_path, "a", now=1_000_000.0).name)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stem = min(names)
    assert sorted(names) == sorted([stem, *(f"{stem}-{n}" for n in range(2, 9))])


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a b", "a\n", "x" * 101, "é"])
def test_a_run_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        RunDirectoryError, match=r"run\.name .* cannot name a folder; use up to 100"
    ):
        RunDirectory.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_of_the_root_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunDirectoryError, match="runs") as caught:
        RunDirectory.create(tmp_path / "runs", "a")
    assert caught.value.exit_code == 2
    with pytest.raises(RunDirectoryError, match="choose another folder with --run-dir"):
        RunDirectory.create_at(tmp_path / "runs" / "below")


def test_a_chosen_folder_is_made_and_may_exist_while_empty(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine"
    assert RunDirectory.create_at(path).path == path
    assert RunDirectory.create_at(path).path == path


def test_a_chosen_folder_that_is_in_use_or_a_file_is_refused(
    run: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(RunDirectoryError, match="holds a run already; add --resume"):
        RunDirectory.create_at(run.path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("")
    with pytest.raises(RunDirectoryError, match=r"home is not empty; .* name a new folder"):
        RunDirectory.create_at(tmp_path / "home")
    with pytest.raises(RunDirectoryError, match="letter is a file"):
        RunDirectory.create_at(tmp_path / "home" / "letter")


def test_a_command_that_cannot_go_on_names_its_own_option(
    run: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(RunDirectoryError, match=r"already; name a new folder with --out$"):
        RunDirectory.create_at(run.path, option="--out")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"choose another folder with --out$"):
        RunDirectory.create_at(tmp_path / "file" / "below", option="--out")
    with pytest.raises(RunDirectoryError, match=r"choose another folder with --out$"):
        RunDirectory.create(tmp_path / "file" / "below", "a", option="--out")


def test_what_never_began_has_no_file_but_those_of_a_start(run: RunDirectory) -> None:
    for name in ("lock", "lock.json", "sync.jsonl", ".plugins.json.0123456789ab.partial"):
        (run.path / name).write_text("")
    assert never_began(run.path)
    run.metrics.write_text("")
    assert not never_began(run.path)


def test_open_finds_an_earlier_run(run: RunDirectory) -> None:
    found = RunDirectory.open(run.path)
    assert found.path == run.path
    assert found.metrics == run.path / "metrics.jsonl"


def test_open_of_a_missing_folder_names_the_newest_run_there(run: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match="there is no run directory") as caught:
        RunDirectory.open(run.path.parent / "glyps")
    assert str(caught.value).endswith(f"is {run.path}")


def test_open_of_a_missing_folder_without_runs_beside_it_says_just_that(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"there is no run directory .*/nowhere/runs/a$"):
        RunDirectory.open(tmp_path / "nowhere" / "runs" / "a")


def test_open_of_a_file_in_a_run_names_the_run(run: RunDirectory) -> None:
    with pytest.raises(
        RunDirectoryError, match="is a file; name the run directory itself"
    ) as caught:
        RunDirectory.open(run.recipe)
    assert str(run.path) in str(caught.value)


def test_open_of_another_folder_says_what_is_missing_and_where_runs_are(run: RunDirectory) -> None:
    with pytest.raises(RunDirectoryError, match=r"none of recipe\.toml, metrics\.jsonl") as caught:
        RunDirectory.open(run.path.parent)
    assert str(caught.value).endswith(str(run.path))
    run.checkpoints.mkdir()
    with pytest.raises(RunDirectoryError, match="it lies in the run directory") as caught:
        RunDirectory.open(run.checkpoints)
    assert str(caught.value).endswith(str(run.path))


def test_every_path_lies_in_the_folder(run: RunDirectory) -> None:
    paths = [
        run.recipe,
        run.plugins,
        run.metrics,
        run.sync,
        run.summary,
        run.report,
        run.log,
        run.samples,
        run.checkpoints,
        run.adapter,
    ]
    assert {path.parent for path in paths} == {run.path}
    assert len({path.name for path in paths}) == len(paths)


def test_a_second_writer_is_refused_with_pid_and_host_of_the_first(run: RunDirectory) -> None:
    first = hold(run.path)
    try:
        started = time.monotonic()
        pattern = (
            rf"is in use by process {first.pid} on {re.escape(os.uname().nodename)}; wait for it"
        )
        with pytest.raises(RunDirectoryError, match=pattern), RunDirectory.open(run.path):
            pass
        assert time.monotonic() - started < 1
    finally:
        end(first)
    with RunDirectory.open(run.path):
        pass


def test_a_second_writer_in_the_same_process_is_refused_too(run: RunDirectory) -> None:
    with (
        run,
        pytest.raises(RunDirectoryError, match=f"process {os.getpid()}"),
        RunDirectory.open(run.path),
    ):
        pass


def test_the_lock_of_a_killed_process_is_no_obstacle(run: RunDirectory) -> None:
    first = hold(run.path)
    first.kill()
    first.communicate()
    assert (run.path / "lock.json").exists()
    (run.path / ".summary.json.0123456789ab.partial").write_text("half")
    with RunDirectory.open(run.path) as again:
        assert json.loads((again.path / "lock.json").read_text())["pid"] == os.getpid()
        assert not list(run.path.glob(".*.partial"))


def test_the_lock_is_free_after_an_error_inside(run: RunDirectory) -> None:
    with pytest.raises(ZeroDivisionError), run:
        raise ZeroDivisionError
    assert not (run.path / "lock.json").exists()
    with RunDirectory.open(run.path):
        pass


def test_a_holder_that_left_no_name_is_another_process(run: RunDirectory) -> None:
    with run:
        (run.path / "lock.json").write_text("{")
        with (
            pytest.raises(RunDirectoryError, match="in use by another process"),
            RunDirectory(run.path),
        ):
            pass


def test_reading_needs_no_lock(run: RunDirectory) -> None:
    first = hold(run.path)
    try:
        assert is_run_directory(RunDirectory.open(run.path).path)
    finally:
        end(first)


def end_with(error: BaseException, directory: RunDirectory, *files: str) -> None:
    """Let a run of this directory write files, then end by an error."""

    def run() -> None:
        with directory:
            for name in files:
                (directory.path / name).write_text(name)
            raise error

    with pytest.raises(type(error)):
        run()


REFUSALS = (BadInput("refused"), LoraError("no such layer"), RankError("rank 1: refused", 2))


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("found", [False, True])
def test_a_run_that_is_refused_before_its_first_figure_leaves_nothing(
    tmp_path: Path, found: bool, refusal: DrlError
) -> None:
    """A folder that was there, empty, is there again; the mended recipe can have the same one."""
    path = tmp_path / "runs" / "mine"
    if found:
        path.mkdir(parents=True)
    for _ in range(2):
        directory = RunDirectory.create_at(path)
        end_with(refusal, directory, "recipe.toml", "plugins.json", "sync.jsonl")
        assert path.exists() == found
        assert not found or not any(path.iterdir())


@pytest.mark.parametrize("own", ["metrics.jsonl", "run.log", "of-a-plugin.txt"])
def test_a_refusal_after_something_was_told_leaves_all_of_it(tmp_path: Path, own: str) -> None:
    directory = RunDirectory.create(tmp_path, "glyphs")
    end_with(BadInput("refused"), directory, "recipe.toml", own)
    assert {"recipe.toml", own} <= {path.name for path in directory.path.iterdir()}


def test_what_failed_or_was_opened_stays_for_a_resume(tmp_path: Path) -> None:
    for error in (ZeroDivisionError(), RankError("rank 1 died")):
        directory = RunDirectory.create(tmp_path, "glyphs")
        end_with(error, directory, "recipe.toml")
    end_with(BadInput("refused"), RunDirectory.open(directory.path))
    assert directory.recipe.read_text() == "recipe.toml"


def test_a_directory_can_go_with_whatever_ends_its_work(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "glyphs")
    directory.only_results = True
    end_with(KeyboardInterrupt(), directory, "recipe.toml")
    assert not directory.path.exists()
