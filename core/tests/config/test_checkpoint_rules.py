"""Rules about checkpoints: what is kept, what a run starts from, whose schedule holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Problems = Callable[..., dict[str, str]]
Warnings = Callable[..., dict[str, str]]
Load = Callable[..., Any]

HELD = {"eval.datasets": [{"name": "held", "path": "prompts.jsonl"}], "eval.interval": 1}
KEEP = {**HELD, "checkpoint.keep_last": 2, "checkpoint.keep_best": 1}


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        ({"checkpoint.load": "nowhere"}, "checkpoint.load", "there is no folder"),
        ({"checkpoint.load": "prompts.jsonl"}, "checkpoint.load", "there is no folder"),
        ({"checkpoint.step": 0}, "checkpoint.step", "must be at least 1"),
        ({"checkpoint.keep_last": 0}, "checkpoint.keep_last", "must be above 0"),
        ({"checkpoint.keep_best": -1}, "checkpoint.keep_best", "must be at least 0"),
        ({"checkpoint.best_mode": "most"}, "checkpoint.best_mode", "max"),
        ({"checkpoint.best_metric": "held"}, "checkpoint.best_metric", "eval/"),
        (KEEP, "checkpoint.best_metric", "is required by checkpoint.keep_best"),
        (
            {**KEEP, "checkpoint.best_metric": "eval/other"},
            "checkpoint.best_metric",
            "no evaluation has the figure 'eval/other'; eval.datasets gives eval/held",
        ),
        (
            {**KEEP, "checkpoint.best_metric": "eval/held/rollout_sampler"},
            "checkpoint.best_metric",
            "needs eval.rollout_sampler = true",
        ),
        (
            {**KEEP, "checkpoint.best_metric": "eval/held", "checkpoint.keep_last": None},
            "checkpoint.keep_best",
            "set checkpoint.keep_last",
        ),
        (
            {
                "optimizer.override_lr_scheduler": True,
                "optimizer.use_checkpoint_lr_scheduler": True,
            },
            "optimizer.override_lr_scheduler",
            "excludes optimizer.use_checkpoint_lr_scheduler = true",
        ),
    ],
)
def test_what_is_refused(problems: Problems, changes: dict[str, Any], path: str, said: str) -> None:
    found = problems(changes)
    assert list(found) == [path]
    assert said in found[path]


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        ({"checkpoint.step": 3}, "checkpoint.step", "there is no checkpoint.load"),
        ({"checkpoint.best_metric": "eval/x"}, "checkpoint.best_metric", "keep_best is 0"),
        ({"checkpoint.save_optim": False}, "checkpoint.save_optim", "load_optim = false"),
        (
            {**KEEP, "checkpoint.best_metric": "eval/held", "eval.interval": 0},
            "eval.interval",
            "only the last iteration is scored",
        ),
    ],
)
def test_what_is_warned_of(
    warnings: Warnings, changes: dict[str, Any], path: str, said: str
) -> None:
    assert said in warnings(changes)[path]


@pytest.mark.parametrize(
    "changes",
    [
        {**KEEP, "checkpoint.best_metric": "eval/held"},
        {
            **KEEP,
            "checkpoint.best_metric": "eval/held/rollout_sampler",
            "eval.rollout_sampler": True,
        },
        {"checkpoint.keep_last": 3},
        {"checkpoint.load": ".", "checkpoint.step": 3},
        {"optimizer.override_lr_scheduler": True},
        {"optimizer.use_checkpoint_lr_scheduler": False},
    ],
)
def test_what_is_fine(load: Load, changes: dict[str, Any]) -> None:
    warned = {problem.path for problem in load(changes).warnings}
    assert not warned & {key for key in changes if key.startswith(("checkpoint", "optimizer"))}


def test_a_path_to_load_starts_at_the_file_that_names_it(load: Load, folder: Path) -> None:
    (folder / "runs").mkdir()
    assert load({"checkpoint.load": "runs"}).checkpoint.load == folder / "runs"
