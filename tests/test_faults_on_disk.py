"""Checkpoints, signals and resumes of real runs: a full disk, damage, Ctrl-C, exact totals."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from e2e import (
    metric_rows,
    run_here,
    same,
    set_words,
    summary_of,
    trainer_state,
    without_trust,
)
from third_party_plugins import fresh_recorder

from drl.catalog import Catalog
from drl.checkpoint import damage
from drl.checkpoint.folders import TRACKER
from drl.errors import CheckpointError, DrlError, Interrupted
from drl.observe.directory import RunDirectory
from drl_cli.main import execute

STRANGERS = ("acme-recorder", "acme-engines")
QUIET = ("eval.datasets=[]", "checkpoint.save_interval=1")
FINE = (*QUIET, "train.num_steps_per_rollout=2", "train.micro_batch_size=2")
SMALL_FILE = 8192
"""Bytes: room for the lines of a run, not for a checkpoint."""


@pytest.fixture(scope="module")
def straight(lab):
    """Four iterations at one go: the run directory, and the calls of its hooks."""
    Catalog.load()
    recorder = fresh_recorder()
    run_here(lab / "tiny.toml", lab / "straight", "train.num_rollout=4", *FINE)
    return lab / "straight", list(recorder.CALLS)


def saved(run_dir):
    """Return the names in the checkpoint folder, all of them."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def seen(calls):
    """Return (global step) of every optimizer step and (group, epoch, row) of every trained group."""
    steps = [g["report"].global_step for hook, g in calls if hook == "drl_step_finished"]
    groups = [
        (group.group_index, group.prompt.epoch, group.prompt.row)
        for hook, given in calls
        if hook == "drl_rollout_finished"
        for group in given["rollout"].groups
    ]
    return steps, groups


def test_two_resumes_give_the_exact_totals_and_no_row_twice(recipe, tmp_path, recorder, straight):
    run_dir = tmp_path / "run"
    for number, total in enumerate((1, 2, 4)):
        run_here(recipe, run_dir, f"train.num_rollout={total}", *FINE, resume=number > 0)
    steps, groups = seen(recorder.CALLS)
    assert steps == list(range(8))
    assert len(set(groups)) == len(groups) == 8
    assert groups == seen(straight[1])[1]
    assert without_trust(metric_rows(run_dir)) == without_trust(metric_rows(straight[0]))
    assert same(trainer_state(run_dir, 4), trainer_state(straight[0], 4))
    assert summary_of(run_dir)["images_seen"] == 4 * 8


def test_a_damaged_checkpoint_is_named_and_the_one_offered_instead_leads_to_the_same_end(
    recipe, tmp_path, straight, capfd
):
    run_dir = tmp_path / "run"
    run_here(recipe, run_dir, "train.num_rollout=2", *FINE)
    file = run_dir / "checkpoints" / "iter_0000002" / "model" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    sets = set_words(("train.num_rollout=4", *FINE))
    assert execute(["run", str(recipe), "--run-dir", str(run_dir), *sets, "--resume"]) == 2
    shown = capfd.readouterr().err
    assert "iter_0000002 cannot be used: model/__0_0.distcp differs" in shown
    tracker = run_dir / "checkpoints" / TRACKER
    assert f"iter_0000001 is good: write 1 into {tracker}" in shown
    tracker.write_text("1\n")
    run_here(recipe, run_dir, "train.num_rollout=4", *FINE, resume=True)
    assert same(trainer_state(run_dir, 4), trainer_state(straight[0], 4))
    assert damage(run_dir / "checkpoints" / "iter_0000002") is None
    assert without_trust(metric_rows(run_dir)) == without_trust(metric_rows(straight[0]))


@contextmanager
def full_disk():
    """Within, files of this process cannot grow; it can be entered late, by calling what it gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_at_a_save_costs_that_save_only(recipe, tmp_path, recorder, straight):
    run_dir = tmp_path / "run"
    with full_disk() as fill:
        recorder.REACTIONS["drl_step_finished"] = lambda run, report: (
            fill() if report.global_step == 3 else None
        )
        at_once = (*FINE, "checkpoint.asynchronous=false")  # the first save is over by then
        with pytest.raises(DrlError, match=r"iter_0000002 could not be written: .*File too large"):
            run_here(recipe, run_dir, "train.num_rollout=4", *at_once)
    assert saved(run_dir) == ["iter_0000001", TRACKER]
    assert (run_dir / "checkpoints" / TRACKER).read_text() == "1\n"
    recorder.REACTIONS.clear()
    run_here(recipe, run_dir, "train.num_rollout=4", *FINE, resume=True)
    assert same(trainer_state(run_dir, 4), trainer_state(straight[0], 4))


def test_what_a_killed_save_left_behind_is_cleared_away(recipe, tmp_path, recorder):
    left = tmp_path / "run" / "checkpoints" / ".writing-iter_0000001-123"

    def leave(run):
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half")

    recorder.REACTIONS["drl_run_started"] = leave
    run_here(recipe, tmp_path / "run", "train.num_rollout=1", *QUIET)
    assert saved(tmp_path / "run") == ["iter_0000001", TRACKER]


@pytest.mark.parametrize("hook", ["drl_step_finished", "drl_weights_synced"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_iteration_and_saves_it_whenever_it_comes(
    recipe, tmp_path, recorder, capfd, hook, number
):
    times = iter((False, True))  # in the second iteration, before or after its turn to save
    if hook == "drl_weights_synced":
        times = iter((False, False, True))
    recorder.REACTIONS[hook] = lambda **_: signal.raise_signal(number) if next(times) else None
    sets = ("train.num_rollout=9", "checkpoint.save_interval=100", "eval.datasets=[]")
    command = ["run", str(recipe), "--run-dir", str(tmp_path / "run")]
    before = signal.getsignal(number)
    assert execute([*command, *set_words(sets)]) == 130
    assert signal.getsignal(number) is before
    assert saved(tmp_path / "run") == ["iter_0000002", TRACKER]
    assert [row["step"] for row in metric_rows(tmp_path / "run")] == [0, 1]
    shown = capfd.readouterr().err
    assert f"stopped by {number.name} after iteration 2; everything is saved" in shown
    assert f"--resume --run-dir {tmp_path / 'run'}" in shown


def test_a_signal_in_the_last_iteration_changes_nothing(recipe, tmp_path, recorder):
    recorder.REACTIONS["drl_step_finished"] = lambda **_: signal.raise_signal(signal.SIGTERM)
    run_here(recipe, tmp_path / "run", "train.num_rollout=1", *QUIET)
    assert summary_of(tmp_path / "run")["status"] == "finished"


def test_a_second_ctrl_c_stops_at_once_even_when_the_engine_hangs(recipe, tmp_path, recorder):
    asked = []

    def interrupt_twice():
        deadline = time.monotonic() + 60
        while not any(hook == "drl_weights_synced" for hook, _ in recorder.CALLS):
            if time.monotonic() > deadline:
                return
            time.sleep(0.01)
        for _ in range(2):
            time.sleep(0.1)
            asked.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_twice)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_here(recipe, tmp_path / "run", "rollout.engine=acme_hanging", *QUIET)
    assert time.monotonic() - asked[1] < 5
    thread.join()
    assert isinstance(recorder.CALLS[-1][1]["error"], KeyboardInterrupt)
    with RunDirectory.open(tmp_path / "run"):
        pass  # the lock is free


def test_a_second_signal_between_steps_leaves_the_last_checkpoint_usable(
    recipe, tmp_path, recorder, straight
):
    run_dir = tmp_path / "run"

    def twice(run, report):
        for _ in range(2 if report.global_step == 3 else 0):
            signal.raise_signal(signal.SIGINT)

    recorder.REACTIONS["drl_step_finished"] = twice
    with pytest.raises(KeyboardInterrupt):
        run_here(recipe, run_dir, "train.num_rollout=4", *FINE)
    recorder.REACTIONS.clear()
    run_here(recipe, run_dir, "train.num_rollout=4", *FINE, resume=True)
    assert same(trainer_state(run_dir, 4), trainer_state(straight[0], 4))


def test_state_is_saved_by_time_as_well(recipe, tmp_path, recorder):
    sets = ("train.num_rollout=3", "checkpoint.save_interval=100", "eval.datasets=[]")
    run_here(recipe, tmp_path / "often", *sets, "checkpoint.every_minutes=1e-9")
    assert saved(tmp_path / "often")[:3] == [f"iter_{n:07d}" for n in (1, 2, 3)]
    run_here(recipe, tmp_path / "never", *sets, "checkpoint.every_minutes=0")
    assert saved(tmp_path / "never") == ["iter_0000003", TRACKER]


def test_a_run_that_failed_before_its_first_checkpoint_starts_over_and_says_so(
    recipe, tmp_path, recorder, straight
):
    def fail(**_):
        raise RuntimeError("early")

    recorder.REACTIONS["drl_step_finished"] = fail
    with pytest.raises(RuntimeError, match="early"):
        run_here(recipe, tmp_path / "run", "train.num_rollout=4", *FINE)
    recorder.REACTIONS.clear()
    lines = run_here(recipe, tmp_path / "run", "train.num_rollout=4", *FINE, resume=True)
    assert "before its first checkpoint: the run starts over" in "\n".join(lines)
    assert same(trainer_state(tmp_path / "run", 4), trainer_state(straight[0], 4))
    assert metric_rows(tmp_path / "run") == metric_rows(straight[0])


def test_a_damaged_checkpoint_is_never_taken_for_no_checkpoint(recipe, tmp_path, recorder):
    run_dir = tmp_path / "run"
    run_here(recipe, run_dir, "train.num_rollout=1", *QUIET)
    (run_dir / "checkpoints" / TRACKER).unlink()
    (run_dir / "checkpoints" / "iter_0000001" / "run.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"iter_0000001 cannot be used: run\.json differs"):
        run_here(recipe, run_dir, *QUIET, resume=True)


def test_an_interrupted_run_says_so_to_its_hooks_and_goes_on_exactly(
    recipe, tmp_path, recorder, straight
):
    run_dir = tmp_path / "run"
    recorder.REACTIONS["drl_weights_synced"] = lambda run, version: (
        signal.raise_signal(signal.SIGTERM) if version == 2 else None
    )
    sets = tuple(setting for setting in FINE if "save_interval" not in setting)
    with pytest.raises(Interrupted):
        run_here(recipe, run_dir, "train.num_rollout=4", *sets)
    recorder.REACTIONS.clear()
    run_here(recipe, run_dir, "train.num_rollout=4", *sets, resume=True)
    assert same(trainer_state(run_dir, 4), trainer_state(straight[0], 4))
