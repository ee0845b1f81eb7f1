"""Ranks that are killed, and runs that go on with another number of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from courses import Course, check_what_is_left, moments
from e2e import metric_rows, trained_weights, trainer_state, without_trust

STRANGERS = ()
QUIET = ("eval.datasets=[]", "eval.interval=0", "train.num_rollout=2")

pytestmark = pytest.mark.slow  # every further rank is a process that imports everything


def ranks(count):
    return f"cluster.actor_num_gpus_per_node={count}"


@pytest.fixture(scope="module")
def course(zygote, lab, tmp_path_factory):
    """Two iterations on two ranks."""
    return Course.run(zygote, lab / "tiny.toml", tmp_path_factory.mktemp("two"), *QUIET, ranks(2))


@pytest.fixture(scope="module")
def alone(zygote, lab, tmp_path_factory):
    """The same on one."""
    return Course.run(zygote, lab / "tiny.toml", tmp_path_factory.mktemp("one"), *QUIET)


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def group_of(leader):
    """Return the living processes that a run consists of, its own first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it ended meanwhile
            continue
        if int(group) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def rank_of(leader, number):
    """Return the process of a rank above 0: the children that are no resource tracker, in order."""
    spawned = [
        pid
        for pid in group_of(leader)
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return spawned[number - 1]


def nobody_is_left(leader):
    deadline = time.monotonic() + 20
    while group_of(leader):
        assert time.monotonic() < deadline, group_of(leader)
        time.sleep(0.05)


def killed(course, run_dir, whom):
    """Kill part of a run once its second checkpoint is being written; return how the driver ended."""
    child = course.begin(run_dir)
    writing = run_dir / "checkpoints"
    assert child.wait_until(lambda: any(writing.glob("*iter_0000002*"))), child.output
    if whom == "all":
        os.killpg(child.pid, signal.SIGKILL)
    else:
        os.kill(child.pid if whom == "driver" else rank_of(child.pid, 1), signal.SIGKILL)
    code = child.wait()
    nobody_is_left(child.pid)
    check_what_is_left(run_dir)
    return code, child.output


@pytest.mark.parametrize("whom", ["driver", "rank", "all"])
def test_whichever_process_is_killed_all_end_and_a_resume_ends_as_if_nothing_had_happened(
    course, run_dir, whom
):
    code, output = killed(course, run_dir, whom)
    if whom == "rank" and code:
        assert code == 1
        assert "rank 1 died (SIGKILL" in output
        assert "Traceback" not in output
    elif whom != "rank":
        assert code == -signal.SIGKILL
    course.finish(run_dir)


@pytest.mark.parametrize("share", moments(seed=5, count=20))
def test_two_ranks_killed_at_a_random_moment(course, run_dir, share):
    child = course.kill_at(run_dir, share)
    nobody_is_left(child.pid)
    course.finish(run_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_two_ranks_saves_and_costs_nothing(course, run_dir, number):
    child = course.begin(run_dir)
    assert child.wait_until((run_dir / "checkpoints").is_dir)
    os.killpg(child.pid, number)  # as a terminal does: to every process
    assert child.wait() in (0, 130), child.output
    nobody_is_left(child.pid)
    assert "Traceback" not in child.output
    course.finish(run_dir)


def apart(found, expected):
    """Return the largest difference of any value, relative to the largest of its tensor."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-12))
        for name, tensor in expected.items()
    )


SMOOTH = ("optimizer.eps=1.0", "optimizer.lr=10.0")
"""An Adam that is nearly linear in the gradient: rounding stays as small as it is."""


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_that_goes_on_with_other_ranks_ends_within_rounding(
    zygote, lab, tmp_path, run_dir, before, after
):
    common = (zygote, lab / "tiny.toml")
    straight = Course.run(*common, tmp_path, *QUIET, *SMOOTH, ranks(before))
    straight.kill_before(run_dir, "open checkpoints/.latest", 2)
    other = Course(*common, (*straight.sets, ranks(after)), straight.straight)
    child = other.begin(run_dir)
    assert child.wait() == 0, child.output
    found, expected = trainer_state(run_dir, 2), trainer_state(straight.straight, 2)
    assert apart(found, expected) < 2e-5
    rows = [without_trust(metric_rows(path)) for path in (run_dir, straight.straight)]
    for one, two in zip(*rows, strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)


def test_one_two_and_four_ranks_have_the_same_gradients(zygote, lab, tmp_path):
    sets = (
        *QUIET,
        "train.num_rollout=1",
        "train.num_steps_per_rollout=1",
        "optimizer.clip_grad=1e9",
    )
    runs = {
        count: Course.run(zygote, lab / "tiny.toml", tmp_path / str(count), *sets, ranks(count))
        for count in (1, 2, 4)
    }
    moments_of = {
        count: {
            name: tensor
            for name, tensor in trainer_state(course.straight, 1).items()
            if name.endswith("/exp_avg")  # after one step: a tenth of the gradient
        }
        for count, course in runs.items()
    }
    assert sum(bool(tensor.any()) for tensor in moments_of[1].values()) > 5
    for count in (2, 4):
        assert apart(moments_of[count], moments_of[1]) < 1e-6  # measured: 1.2e-7
    norms = [metric_rows(course.straight)[0]["train/grad_norm"] for course in runs.values()]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)


def test_two_ranks_learn_what_one_learns(course, alone):
    first = [trained_weights(one.straight, 1) for one in (course, alone)]
    assert first[0].keys() == first[1].keys()
    assert all(torch.isfinite(tensor).all() for tensor in first[0].values())
    rows = [metric_rows(one.straight)[0] for one in (course, alone)]
    assert rows[0]["train/loss"] == pytest.approx(rows[1]["train/loss"], rel=1e-4, abs=1e-6)
    assert rows[0]["train/grad_norm"] == pytest.approx(rows[1]["train/grad_norm"], rel=1e-4)
