"""When a run saves, and what of a save it notices: with a real saver, without a model."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from drl.checkpoint.retention import read_scores
from drl.checkpoint.saver import Finished
from drl.errors import CheckpointError, DrlError
from drl.stages import save as stage
from drl.stages.save import (
    checkpoint_name,
    finish_saving,
    keep_checkpoint,
    keep_if_best,
    read_run_state,
    retention_of,
    save_if_due,
    save_unless_saved,
    settle,
)


class Phases:
    """Writes down which phases were open and what was booked beside them."""

    def __init__(self):
        self.seen, self.beside = [], {}

    @contextmanager
    def phase(self, name):
        self.seen.append(name)
        yield

    def overlap(self, name, seconds):
        self.beside[name] = seconds


class FakeSaver:
    """Ends with what it is given."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.current = Path("/c/iter_0000004")
        self.waits = []

    def take(self, *, wait):
        self.waits.append(wait)
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def made_run(tmp_path, *, rollouts_per_epoch=None, **options):
    values = {
        "save_interval": None,
        "every_minutes": 0.0,
        "asynchronous": True,
        "keep_last": None,
        "keep_best": 0,
        "best_metric": None,
        "best_mode": "max",
    } | options
    events, saved_hooks = [], []
    return SimpleNamespace(
        recipe=SimpleNamespace(
            checkpoint=SimpleNamespace(**values), rollouts_per_epoch=rollouts_per_epoch
        ),
        checkpoints=tmp_path / "checkpoints",
        phases=Phases(),
        saver=FakeSaver(),
        last_save=time.monotonic(),
        saved=-1,
        stop=SimpleNamespace(asked=False),
        is_last=lambda rollout_id: False,
        event=events.append,
        events=events,
        hooks=SimpleNamespace(drl_checkpoint_saved=lambda run, path: saved_hooks.append(path.name)),
        hook_calls=saved_hooks,
    )


@pytest.fixture
def saves(monkeypatch):
    """Write down which iterations are saved instead of saving them."""
    seen = []

    def note(run, rollout_id):
        seen.append(rollout_id)
        run.saved = rollout_id

    monkeypatch.setattr(stage, "save", note)
    return seen


@pytest.mark.parametrize(
    ("interval", "expected"), [(None, []), (1, [0, 1, 2, 3, 4, 5]), (2, [1, 3, 5]), (4, [3])]
)
def test_saves_by_count(tmp_path, saves, interval, expected):
    run = made_run(tmp_path, save_interval=interval)
    for rollout_id in range(6):
        save_if_due(run, rollout_id)
    assert saves == expected


def test_saves_by_count_and_at_the_end_of_each_epoch(tmp_path, saves):
    run = made_run(tmp_path, save_interval=4, rollouts_per_epoch=3)
    for rollout_id in range(9):
        save_if_due(run, rollout_id)
    assert saves == [2, 3, 5, 7, 8]


def test_saves_by_time(tmp_path, saves):
    run = made_run(tmp_path, every_minutes=10.0)
    save_if_due(run, 0)
    run.last_save -= 599
    save_if_due(run, 1)
    run.last_save -= 2
    save_if_due(run, 2)
    assert saves == [2]


@pytest.mark.parametrize("why", ["last", "asked"])
def test_saves_at_the_end_and_when_asked_to_stop(tmp_path, saves, why):
    run = made_run(tmp_path)
    if why == "last":
        run.is_last = lambda rollout_id: rollout_id == 1
    else:
        run.stop.asked = True
    save_if_due(run, 1)
    assert saves == [1]


def test_an_iteration_is_saved_once(tmp_path, saves):
    run = made_run(tmp_path)
    save_unless_saved(run, 3)
    save_unless_saved(run, 3)
    assert saves == [3]


def test_every_save_point_looks_at_the_save_under_way_without_waiting(tmp_path, saves):
    run = made_run(tmp_path)
    save_if_due(run, 0)
    assert run.saver.waits == [False]
    assert run.phases.seen == []


def test_a_finished_save_is_told_to_user_and_plugins_once(tmp_path):
    run = made_run(tmp_path)
    done = Finished(final=Path("/c/iter_0000004"), seconds=2.5, removed=("iter_0000001",))
    run.saver = FakeSaver(done)
    settle(run, wait=False)
    settle(run, wait=False)
    assert run.events == ["saved iter_0000004; deleted iter_0000001"]
    assert run.hook_calls == ["iter_0000004"]
    assert run.phases.beside == {"save": 2.5}


def test_waiting_for_a_save_is_time_that_a_save_blocks(tmp_path):
    run = made_run(tmp_path)
    settle(run, wait=True)
    assert run.phases.seen == ["save_block"]


def test_a_save_that_failed_says_what_is_left_and_how_to_go_on(tmp_path):
    run = made_run(tmp_path)
    run.saver = FakeSaver(OSError(28, "No space left on device"))
    with pytest.raises(DrlError) as caught:
        settle(run, wait=False)
    text = str(caught.value)
    assert "checkpoint iter_0000004 could not be written: [Errno 28] No space left" in text
    assert "earlier checkpoints in /c are untouched" in text
    assert "--resume" in text
    assert run.events == []


def test_errors_of_drl_pass_as_they_are(tmp_path):
    run = made_run(tmp_path)
    run.saver = FakeSaver(CheckpointError("the adapter differs"))
    with pytest.raises(CheckpointError, match="the adapter differs"):
        settle(run, wait=True)


def test_the_end_waits_and_prunes_by_the_last_scores(tmp_path):
    run = made_run(tmp_path, keep_last=1, keep_best=1, best_metric="eval/a")
    for number in (1, 2, 3):
        (run.checkpoints / checkpoint_name(number - 1)).mkdir(parents=True)
    keep_scores(run, {1: 0.5, 2: 0.75, 3: 0.25})
    finish_saving(run)
    assert run.saver.waits == [True]
    assert run.events == ["deleted iter_0000001"]


def keep_scores(run, scores):
    run.saved = -2
    for done, score in scores.items():
        run.saved = done - 1
        keep_if_best(run, done, {"eval/a": score, "eval/b": 9.0})


def test_the_best_so_far_gets_a_checkpoint_although_none_was_due(tmp_path, saves):
    run = made_run(tmp_path, keep_last=1, keep_best=1, best_metric="eval/a")
    for done, score in {1: 0.5, 2: 0.25, 3: 0.75}.items():
        keep_if_best(run, done, {"eval/a": score})
    assert saves == [0, 2]
    assert read_scores(run.checkpoints) == {1: 0.5, 2: 0.25, 3: 0.75}


def test_smaller_may_be_better(tmp_path, saves):
    run = made_run(tmp_path, keep_last=1, keep_best=1, best_metric="eval/a", best_mode="min")
    for done, score in {1: 0.5, 2: 0.25, 3: 0.75}.items():
        keep_if_best(run, done, {"eval/a": score})
    assert saves == [0, 1]


@pytest.mark.parametrize(
    ("done", "figures"),
    [(0, {"eval/a": 1.0}), (2, {"eval/other": 1.0}), (2, {"eval/a": float("nan")})],
)
def test_what_scores_nothing(tmp_path, saves, done, figures):
    run = made_run(tmp_path, keep_last=1, keep_best=1, best_metric="eval/a")
    keep_if_best(run, done, figures)
    assert saves == []
    assert read_scores(run.checkpoints) == {}


def test_without_a_metric_nothing_is_scored(tmp_path, saves):
    keep_if_best(made_run(tmp_path), 2, {"eval/a": 1.0})
    assert saves == []


def test_a_verdict_keeps_a_checkpoint_by_name(tmp_path, saves):
    run = made_run(tmp_path)
    run.checkpoints.mkdir()
    keep_checkpoint(run, 3, "a fine\none")
    assert saves == [3]
    assert (run.checkpoints / "kept.txt").read_text() == "iter_0000004  a fine one\n"


def test_the_retention_of_a_recipe(tmp_path):
    run = made_run(tmp_path, keep_last=3, keep_best=2, best_metric="eval/a", best_mode="min")
    found = retention_of(run.recipe)
    assert (found.last, found.best, found.metric, found.mode) == (3, 2, "eval/a", "min")


def test_a_run_state_that_is_missing_or_nonsense(tmp_path):
    with pytest.raises(CheckpointError, match=r"it has no run\.json"):
        read_run_state(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds list, not a table"):
        read_run_state(tmp_path)
