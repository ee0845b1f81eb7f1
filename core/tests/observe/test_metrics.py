from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drl.observe.metrics import read_metrics


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_come_back_by_iteration(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"step": 1, "time": 5.0, "train/loss": 0.5},
        {"step": 0, "time": 4.0, "train/loss": 0.25, "eval/heldout": 0.6},
    )
    metrics = read_metrics(path)
    assert metrics.series("train/loss") == [(0, 0.25), (1, 0.5)]
    assert metrics.series("eval/heldout") == [(0, 0.6)]
    assert metrics.names() == ["train/loss", "eval/heldout"]
    assert metrics.remarks == ()


def test_an_iteration_that_was_repeated_after_a_resume_counts_once(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"step": 0, "train/loss": 1.0, "rollout/reward/raw_num_samples": 64},
        {"step": 1, "train/loss": 2.0, "rollout/reward/raw_num_samples": 64},
        {"step": 1, "train/loss": 3.0, "rollout/reward/raw_num_samples": 64},
    )
    metrics = read_metrics(path)
    assert metrics.series("train/loss") == [(0, 1.0), (1, 3.0)]
    assert metrics.images_seen() == {0: 64.0, 1: 128.0}


def test_figures_that_are_no_numbers_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "a": NaN, "b": "text", "c": true, "d": 1}\n'
        '{"step": 1, "a": Infinity, "d": ' + "9" * 400 + "}\n"
        '{"step": 2, "d": 1e200}\n'
    )
    metrics = read_metrics(path)
    assert metrics.rows == {0: {"d": 1.0}, 1: {}, 2: {}}
    assert metrics.remarks == (
        "metrics.jsonl: 2 of the values of a are no finite numbers",
        "metrics.jsonl: 1 of the values of b are no finite numbers",
        "metrics.jsonl: 1 of the values of c are no finite numbers",
        "metrics.jsonl: 2 of the values of d are no finite numbers",
    )


def test_rows_without_a_usable_step_are_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"train/loss": 1.0},
        {"step": "1"},
        {"step": True},
        {"step": 10**13},
        {"step": -1, "eval/heldout": 0.5},
    )
    metrics = read_metrics(path)
    assert metrics.rows == {-1: {"eval/heldout": 0.5}}
    assert len(metrics.remarks) == 4


def test_images_seen_counts_failed_samples_too(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"step": -1, "eval/heldout": 0.5},
        {"step": 0, "rollout/reward/raw_num_samples": 60, "rollout/reward/failed": 4},
        {"step": 1, "rollout/reward/raw_num_samples": 64},
    )
    assert read_metrics(path).images_seen() == {-1: 0.0, 0: 64.0, 1: 128.0}


def test_the_count_of_images_that_the_run_logged_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"step": 0, "rollout/reward/raw_num_samples": 60, "rollout/images_seen": 96},
        {"step": 1, "rollout/reward/raw_num_samples": 64},
    )
    assert read_metrics(path).images_seen() == {0: 96.0, 1: 160.0}


def test_training_time_leaves_evaluations_out(tmp_path: Path) -> None:
    path = write(
        tmp_path / "metrics.jsonl",
        {"step": 0, "perf/step_time": 6.0, "perf/eval_time": 2.0},
        {"step": 1, "perf/step_time": 4.5},
    )
    assert read_metrics(path).train_seconds() == 8.5
