"""kill -9 at any moment: the run goes on with --resume and ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import re
import signal

import pytest
from courses import Course, check_what_is_left, kill_when, moments
from e2e import last_saved, metric_rows, summary_of

from drl.checkpoint import damage
from drl.observe.report import write_report

STRANGERS = ()
SECOND = r"checkpoints/\.writing-iter_0000002-\*"
"""The folder that the second checkpoint is written in."""


@pytest.fixture(scope="module")
def course(zygote, lab, tmp_path_factory):
    return Course.run(zygote, lab / "tiny.toml", tmp_path_factory.mktemp("course"))


@pytest.fixture
def run_dir(tmp_path):
    return tmp_path / "run"


def some(values, quick):
    """Return parameters of which all but the first few are for the slow suite."""
    return [
        value if place < quick else pytest.param(value, marks=pytest.mark.slow)
        for place, value in enumerate(values)
    ]


@pytest.mark.parametrize("share", some(moments(seed=1, count=20), quick=6))
def test_a_run_killed_at_a_random_moment_ends_as_if_nothing_had_happened(course, run_dir, share):
    course.kill_at(run_dir, share)
    course.finish(run_dir)


@pytest.mark.parametrize("seed", some(range(2, 6), quick=1))
def test_a_run_whose_resumes_are_killed_too(course, run_dir, seed):
    killed = [course.kill_at(run_dir, share).code for share in moments(seed, 3)]
    assert -signal.SIGKILL in killed
    course.finish(run_dir)
    assert summary_of(run_dir)["iterations"] == 3


BETWEEN = {
    "nothing is written but the lock": ("rename .* -> recipe.toml", 1),
    "the first checkpoint is in place, the tracker is not": ("open checkpoints/.latest", 1),
    "half a checkpoint": (f"mkdir {SECOND}/optimizer", 1),
    "a checkpoint that the tracker does not name": ("open checkpoints/.latest", 2),
    "the adapter of before is aside, the new one is not in place": (r"-> adapter$", 2),
    "a checkpoint is half deleted": (r"checkpoints/\.deleting-iter_0000001.*", 2),
    "evaluated, but not written": (r"rename .* -> evaluations/after.json", 1),
    "recipe, but no row": ("open evaluations/.before", 1),
    "a checkpoint without its manifest": (f"rename .* -> {SECOND}/manifest.json", 1),
    "a whole checkpoint without its name": (f"rename {SECOND} -> ", 1),
    "a tracker that is written, but not in place": ("rename .*latest.* -> checkpoints/latest", 2),
    "tracker, but the adapter of before": (r"open \.adapter\.new-\*/adapter_config.json", 2),
    "a checkpoint is about to be deleted": ("rename checkpoints/iter_0000001 -> ", 1),
    "half the pictures of an evaluation": (r"open samples/after/0002.png", 1),
    "all but the report": (r"open \.report.html", 1),
}


@pytest.mark.parametrize("moment", some(BETWEEN, quick=7))
def test_a_run_killed_between_two_changes_on_the_disk(course, run_dir, moment):
    course.kill_before(run_dir, *BETWEEN[moment])
    course.finish(run_dir)


def test_killed_between_tracker_and_row_the_iteration_gets_its_evaluation_and_row(
    zygote, lab, tmp_path, run_dir
):
    course = Course.run(zygote, lab / "tiny.toml", tmp_path, "checkpoint.asynchronous=false")
    course.kill_before(run_dir, "rename .* -> evaluations/iteration-2")
    assert last_saved(run_dir) == 2
    assert [row["step"] for row in metric_rows(run_dir)] == [-1, 0]
    course.kill_before(run_dir, "rename .* -> evaluations/iteration-2")  # and again in its resume
    child = course.finish(run_dir)
    assert "eval iteration-2" in child.output


def test_a_row_that_a_power_cut_has_torn_is_written_again(course, run_dir):
    course.kill_before(run_dir, "open checkpoints/.latest", 2)
    file = run_dir / "metrics.jsonl"
    whole = file.read_bytes()
    assert whole.count(b"\n") >= 2
    file.write_bytes(whole[:-20])
    course.kill_before(run_dir, "rename .* -> metrics.jsonl")  # while the torn row is dropped
    assert file.read_bytes() == whole[:-20]
    course.finish(run_dir)


def test_what_is_half_written_is_never_offered(course, run_dir):
    course.kill_before(run_dir, f"rename {SECOND} -> ")
    root = run_dir / "checkpoints"
    (half,) = root.glob(".writing-*")
    assert damage(half) is None  # it is whole, but does not have a checkpoint's name yet
    assert last_saved(run_dir) == 1
    (root / "iter_0000001" / "run.json").write_text("{}")
    child = course.begin(run_dir)
    assert child.wait() == 2
    assert "iter_0000001 cannot be used: run.json differs from its checksum" in child.output
    assert "there is no good checkpoint beside it: --resume cannot go on here" in child.output
    assert "go on from the last checkpoint" not in child.output
    assert "writing" not in child.output


def test_a_run_that_goes_back_to_an_earlier_checkpoint_keeps_what_it_saves(course, run_dir):
    """Retention must not take the checkpoints it has left behind for newer than those it makes."""
    assert course.begin(run_dir).wait() == 0
    root = run_dir / "checkpoints"
    assert [folder.name for folder in sorted(root.glob("iter_*"))] == [
        "iter_0000002",
        "iter_0000003",
    ]
    (root / "iter_0000003").rename(root / "iter_0000009")
    (root / "latest_checkpointed_iteration.txt").write_text("2\n")
    course.kill_before(run_dir, "open .summary.json")
    assert last_saved(run_dir) == 3
    assert damage(root / "iter_0000003") is None


def test_a_report_comes_out_of_whatever_a_kill_leaves(course, run_dir):
    course.kill_before(run_dir, r"open samples/after/0002.png")
    assert not (run_dir / "summary.json").exists()
    text = write_report(run_dir).read_text()
    assert "</html>" in text
    assert "0002.png" not in text


@pytest.mark.parametrize("share", some(moments(seed=4, count=10), quick=2))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_a_random_moment_ends_in_order_and_costs_nothing(
    course, run_dir, number, share
):
    child = course.begin(run_dir)
    begun = child.wait_until(lambda: child.used() >= share * course.seconds)
    if begun:
        child.signal(number)
    code, taken = child.wait(), f"{number.name}: finishing this iteration" in child.output
    check_what_is_left(run_dir)
    assert "Traceback" not in child.output
    if taken and code:
        assert code == 130
        done = re.search(rf"stopped by {number.name} after iteration (\d)", child.output)
        assert last_saved(run_dir) == int(done[1])
        assert f"--resume --run-dir {run_dir}" in child.output
    elif code:  # it came before the run had begun to listen
        assert code == (130 if number == signal.SIGINT else -signal.SIGTERM), child.output
    course.finish(run_dir)


def test_a_save_that_is_under_way_when_the_run_is_told_to_stop_is_finished(course, run_dir):
    child = course.begin(run_dir)
    writing = run_dir / "checkpoints"
    assert child.wait_until(lambda: any(writing.glob(".writing-iter_0000001-*")))
    child.signal(signal.SIGTERM)
    assert child.wait() == 130
    saved = last_saved(run_dir)
    assert saved in (1, 2)  # its iteration was over, or the next had begun
    assert [row["step"] for row in metric_rows(run_dir)] == list(range(-1, saved))
    course.finish(run_dir)


def test_a_save_that_is_under_way_when_the_run_is_killed_is_no_checkpoint(course, run_dir):
    child = course.begin(run_dir)
    root = run_dir / "checkpoints"
    kill_when(child, lambda: any(root.glob(".writing-iter_0000002-*/model/*")))
    assert child.code == -signal.SIGKILL
    check_what_is_left(run_dir)
    course.finish(run_dir)


VARIANTS = {
    "dropout": ("lora.dropout=0.2",),
    "reference by EMA": ("ema.enabled=true", "algorithm.ref_mode=ema", "algorithm.kl_beta=0.1"),
    "rollout by EMA": ("ema.enabled=true", "ema.rollout_policy=ema"),
    "full weights": ("lora.enabled=false", "optimizer.lr=1e-4", "sde.type=sde"),
    "fp16": ("train.forward_dtype=fp16",),
    "SGD": ("optimizer.name=sgd", "optimizer.lr_decay_style=cosine"),
    "saved modules and biases": (
        "lora.modules_to_save=['proj_out']",
        "lora.bias=lora_only",
        "sync.updater=in_process_merged",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_state_goes_on_exactly(zygote, lab, tmp_path, run_dir, variant):
    course = Course.run(zygote, lab / "tiny.toml", tmp_path, *VARIANTS[variant])
    course.kill_before(run_dir, "open checkpoints/.latest", 2)
    course.finish(run_dir)


@pytest.mark.slow
def test_a_run_killed_before_each_of_its_changes_on_the_disk(course, tmp_path):
    assert len(course.changes) > 80
    for number in range(1, len(course.changes) + 1):
        run_dir = tmp_path / str(number)
        child = course.begin(run_dir, before="", number=number)
        assert child.wait() in (0, -signal.SIGKILL), child.output
        check_what_is_left(run_dir)
        course.finish(run_dir)
