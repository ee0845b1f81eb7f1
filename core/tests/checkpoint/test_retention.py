"""Which checkpoints stay: tables worked by hand, and what is on the disk afterwards."""

from __future__ import annotations

import json
import math

import pytest

from drl.checkpoint.folders import TRACKER, checkpoints_in, folder_name, write_kept
from drl.checkpoint.retention import (
    SCORES,
    Retention,
    best_of,
    prune,
    read_scores,
    reasons,
    write_score,
)

NUMBERS = [1, 2, 3, 4, 5, 6]
SCORED = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.9, 5: float("nan"), 6: 0.2}


def stay(retention, *, scores=SCORED, kept=()):
    why = reasons(NUMBERS, retention, scores=scores, kept=kept)
    return sorted(number for number, reason in why.items() if reason)


@pytest.mark.parametrize(
    ("last", "best", "mode", "kept", "expected"),
    [
        (None, 0, "max", (), [1, 2, 3, 4, 5, 6]),
        (1, 0, "max", (), [6]),
        (3, 0, "max", (), [4, 5, 6]),
        (9, 0, "max", (), [1, 2, 3, 4, 5, 6]),
        (1, 1, "max", (), [2, 6]),  # the earlier of two equals
        (1, 2, "max", (), [2, 4, 6]),
        (1, 3, "max", (), [2, 3, 4, 6]),
        (1, 1, "min", (), [1, 6]),
        (1, 2, "min", (), [1, 6]),  # 6 is the newest and the second best
        (1, 9, "min", (), [1, 2, 3, 4, 6]),  # a score that is no number is none
        (1, 0, "max", (3,), [3, 6]),
        (2, 1, "max", (3, 9), [2, 3, 5, 6]),
    ],
)
def test_what_stays(last, best, mode, kept, expected):
    retention = Retention(last=last, best=best, metric="eval/x", mode=mode)
    assert stay(retention, kept=kept) == expected


def test_each_reason_is_said():
    retention = Retention(last=2, best=2, metric="eval/x")
    why = reasons(NUMBERS, retention, scores=SCORED, kept=[2])
    assert why == {
        6: ["newest"],
        5: ["recent"],
        4: ["best 2"],
        3: [],
        2: ["best 1", "kept"],
        1: [],
    }


def test_the_best_of_all_evaluations_may_have_no_checkpoint_any_more():
    retention = Retention(last=1, best=1, metric="eval/x")
    assert best_of({9: 5.0, 2: 1.0}, retention) == [9]
    assert stay(retention, scores={9: 5.0, 2: 1.0}) == [6]


def test_nothing_to_choose_from():
    assert reasons([], Retention(last=1), scores={}, kept=[]) == {}
    assert best_of({}, Retention(best=3)) == []


@pytest.fixture
def root(tmp_path):
    for number in NUMBERS:
        (tmp_path / folder_name(number) / "model").mkdir(parents=True)
    (tmp_path / TRACKER).write_text("6\n")
    return tmp_path


def test_pruning_deletes_what_has_no_reason_and_says_what(root):
    for number, score in SCORED.items():
        if math.isfinite(score):
            write_score(root, number, score)
    write_kept(root, folder_name(1), "by a verdict")
    removed = prune(root, Retention(last=1, best=1, metric="eval/x"))
    assert removed == [folder_name(n) for n in (5, 4, 3)]
    assert list(checkpoints_in(root)) == [1, 2, 6]
    assert sorted(path.name for path in root.iterdir() if path.name.startswith(".")) == []


def test_by_default_nothing_is_ever_deleted(root):
    assert prune(root, Retention()) == []
    assert list(checkpoints_in(root)) == NUMBERS


def test_scores_are_remembered_by_folder(tmp_path):
    write_score(tmp_path / "new", 12, 0.5)
    write_score(tmp_path / "new", 3, -1.0)
    write_score(tmp_path / "new", 12, 0.75)
    assert read_scores(tmp_path / "new") == {3: -1.0, 12: 0.75}
    table = json.loads((tmp_path / "new" / SCORES).read_text())
    assert table == {"iter_0000003": -1.0, "iter_0000012": 0.75}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"iter_x": 1}', '{"iter_0000001": []}', "3"])
def test_scores_that_cannot_be_read_are_no_scores(tmp_path, text):
    (tmp_path / SCORES).write_text(text)
    assert read_scores(tmp_path) == {}
