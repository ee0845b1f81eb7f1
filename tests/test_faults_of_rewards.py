"""Rewards that fail in a run: masked or named, never trained on; their processes never outlive it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from e2e import metric_rows, run_here, set_words, start_run, trained_weights

from drl.errors import EngineError, RewardError
from drl.observe.directory import RunDirectory
from drl_cli.main import execute

STRANGERS = ("acme-recorder", "acme-engines", "acme-rewards")
QUIET = ("eval.datasets=[]", "train.num_rollout=2")


def sets_of(reward, *more):
    return (f"reward.type={reward}", *QUIET, *more)


def arguments(recorder, hook):
    return [given for name, given in recorder.CALLS if name == hook]


def seconds_until(condition, limit):
    """Wait until a condition holds; return how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit
        time.sleep(0.02)
    return time.monotonic() - start


FAILURES = {
    "acme_nan": "value nan",
    "acme_none": "acme: no face found",
    "acme_inf": "value inf",
}


@pytest.mark.parametrize("reward", FAILURES)
def test_a_failed_score_stops_the_run_and_names_sample_term_and_way_out(
    recipe, tmp_path, recorder, reward
):
    with pytest.raises(RewardError) as caught:
        run_here(recipe, tmp_path / "run", *sets_of(reward))
    text = str(caught.value)
    assert f"'{reward}': '{FAILURES[reward]}'" in text
    assert "sample 1 (prompt row 1)" in text
    assert 'reward.on_failure = "mask"' in text
    assert arguments(recorder, "drl_step_finished") == []


def advantages(rewards):
    values = torch.tensor(rewards, dtype=torch.float64)
    return ((values - values.mean()) / (values.std() + 1e-4)).tolist()


@pytest.mark.parametrize("reward", FAILURES)
def test_a_masked_score_leaves_statistics_sum_and_divisor(recipe, tmp_path, recorder, reward):
    sets = sets_of(reward, "reward.on_failure=mask", "train.num_rollout=1")
    run_here(recipe, tmp_path / "run", *sets)
    (given,) = arguments(recorder, "drl_rollout_finished")
    groups = [[s.reward for s in group.samples] for group in given["rollout"].groups]
    assert [group[1] for group in groups] == [None, None]
    known = [a for group in groups for a in advantages([r for r in group if r is not None])]
    (row,) = metric_rows(tmp_path / "run")
    assert row["train/loss"] == pytest.approx(-sum(known) / 6, rel=1e-4, abs=1e-6)
    assert row["train/adv_abs_mean"] == pytest.approx(sum(map(abs, known)) / 6, rel=1e-4)
    assert row["rollout/reward/failed"] == 2
    assert row["rollout/reward/raw_num_samples"] == 6


def test_a_rollout_without_a_single_score_stops_even_when_masked(recipe, tmp_path, recorder):
    with pytest.raises(RewardError, match=r"none of its 8 samples .*acme: server is down"):
        run_here(recipe, tmp_path / "run", *sets_of("acme_nothing", "reward.on_failure=mask"))


def test_equal_rewards_give_no_gradient_and_leave_the_weights(recipe, tmp_path, recorder):
    run_here(recipe, tmp_path / "run", *sets_of("acme_equal", "checkpoint.save_interval=1"))
    reports = [given["report"] for given in arguments(recorder, "drl_step_finished")]
    reason = "the gradient is exactly 0: no group is informative"
    assert [report.skipped for report in reports] == [reason] * 2
    before, after = trained_weights(tmp_path / "run", 1), trained_weights(tmp_path / "run", 2)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(tensor.any() for name, tensor in after.items() if "lora_B" in name)
    rows = metric_rows(tmp_path / "run")
    assert [row["rollout/informative_groups"] for row in rows] == [0, 0]
    assert [row["train/skipped_steps"] for row in rows] == [1, 1]


def test_a_run_goes_on_when_some_rollouts_teach_nothing(recipe, tmp_path, recorder):
    def flatten(run, rollout):
        for sample in rollout.samples if rollout.rollout_id == 1 else ():
            sample.reward = 0.5

    recorder.REACTIONS["drl_rollout_finished"] = flatten
    sets = ("train.num_rollout=3", "checkpoint.save_interval=1", "eval.datasets=[]")
    run_here(recipe, tmp_path / "run", *sets)
    one, two, three = (trained_weights(tmp_path / "run", n) for n in (1, 2, 3))
    assert all(torch.equal(one[name], two[name]) for name in one)  # no momentum either
    assert any(not torch.equal(two[name], three[name]) for name in two)


def test_a_worker_that_dies_ends_the_run_within_seconds(recipe, tmp_path, recorder):
    died = []

    def kill_worker(run, report):
        for process in run.rewards.terms[0].executor._processes.values():
            os.kill(process.pid, signal.SIGKILL)
        died.append(time.monotonic())

    recorder.REACTIONS["drl_step_finished"] = kill_worker
    with pytest.raises(RewardError, match="'acme_worker': its worker process died"):
        run_here(recipe, tmp_path / "run", *sets_of("acme_worker"))
    assert time.monotonic() - died[0] < 10
    assert isinstance(recorder.CALLS[-1][1]["error"], RewardError)
    assert multiprocessing.active_children() == []


def test_no_worker_is_left_when_the_engine_fails(recipe, tmp_path, recorder):
    sets = sets_of("acme_worker", "rollout.engine=acme_failing")
    with pytest.raises(EngineError, match="acme: out of memory"):
        run_here(recipe, tmp_path / "run", *sets)
    assert multiprocessing.active_children() == []
    with RunDirectory.open(tmp_path / "run"):
        pass  # the lock is free


def interrupt_twice(run_dir, over):
    """Press Ctrl-C twice once the reward is stuck; a run that does not end loses its workers."""
    seconds_until((run_dir / "scoring").exists, 60)
    for _ in range(2):
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
    if not over.wait(20):
        for process in multiprocessing.active_children():
            process.kill()


def test_ctrl_c_twice_ends_a_run_whose_reward_never_answers(recipe, tmp_path, recorder, capfd):
    over = threading.Event()
    thread = threading.Thread(target=interrupt_twice, args=(tmp_path / "run", over))
    thread.start()
    sets = set_words(sets_of("acme_stuck"))
    assert execute(["run", str(recipe), "--run-dir", str(tmp_path / "run"), *sets]) == 130
    began = (tmp_path / "run" / "scoring").stat().st_mtime
    assert time.time() - began < 10
    over.set()
    thread.join()
    assert "interrupted" in capfd.readouterr().err
    assert isinstance(arguments(recorder, "drl_run_finished")[0]["error"], KeyboardInterrupt)
    assert multiprocessing.active_children() == []


def alive(pid):
    """True for a process that runs; a zombie has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def stuck(lab, recipe, tmp_path):
    """A run in a process of its own whose reward hangs, and the process ids of its children."""
    sets = set_words(sets_of("acme_stuck"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(lab / "site"), prepend=os.pathsep)
        process = start_run(recipe, tmp_path / "run", *sets)
    try:
        seconds_until((tmp_path / "run" / "scoring").exists, 60)
        threads = Path(f"/proc/{process.pid}/task").glob("*/children")  # per thread that made them
        yield process, [int(pid) for thread in threads for pid in thread.read_text().split()]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_run_keeps_others_out_and_kill_9_takes_its_workers_along_and_frees_it(
    recipe, tmp_path, capfd, stuck
):
    process, children = stuck
    assert children
    assert execute(["run", str(recipe), "--run-dir", str(tmp_path / "run"), "--resume"]) == 2
    assert f"is in use by process {process.pid} on " in capfd.readouterr().err
    process.kill()
    process.wait()
    try:
        seconds_until(lambda: not any(alive(pid) for pid in children), 10)
    finally:
        for pid in filter(alive, children):
            os.kill(pid, signal.SIGKILL)
    with RunDirectory.open(tmp_path / "run"):
        pass  # the lock is free
