"""The check of evaluations at the end of a run, its length in epochs, and what is due when."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drl.errors import BadInput, CheckFailed
from drl.stages.ci import check_evaluations, verdict
from drl.stages.periodic import due
from drl.stages.start import chosen_start, counted_in_iterations


def ci_run(
    folder: Path, values: dict[str, tuple[int, Any]], *, enabled: bool = True, limit: float = 0.5
) -> Any:
    """A run whose evaluations, by label, have (iterations done, figures)."""
    for label, (done, means) in values.items():
        table = {"rollout_id": done, "means": means, "metrics": {"eval/extra": 0.75}, "rows": []}
        (folder / f"{label}.json").write_text(json.dumps(table))
    ci = SimpleNamespace(enabled=enabled, metric_key="eval/heldout", metric_threshold=limit)
    return SimpleNamespace(recipe=SimpleNamespace(debug=SimpleNamespace(ci=ci)), evaluations=folder)


def test_one_evaluation_at_the_threshold_is_enough(tmp_path: Path) -> None:
    values = {"after": (12, {"heldout": 0.25}), "iteration-8": (8, {"heldout": 0.5})}
    run = ci_run(tmp_path, values)
    assert check_evaluations(run) == (
        "debug.ci: eval/heldout 0.5 in evaluation iteration-8, at least 0.5"
    )
    run.recipe.debug.ci.metric_key = "eval/extra"
    assert "0.75" in (check_evaluations(run) or "")


def test_a_check_that_is_off_looks_at_nothing(tmp_path: Path) -> None:
    assert check_evaluations(ci_run(tmp_path / "absent", {}, enabled=False)) is None


def test_below_the_threshold_all_values_are_told_in_order(tmp_path: Path) -> None:
    values = {
        "after": (12, {"heldout": 0.2}),
        "before": (0, {"heldout": 0.1}),
        "iteration-9": (9, {"heldout": 0.3}),
    }
    with pytest.raises(CheckFailed) as caught:
        check_evaluations(ci_run(tmp_path, values))
    assert caught.value.exit_code == 1
    assert str(caught.value).splitlines() == [
        "debug.ci: eval/heldout reached 0.3, and debug.ci.metric_threshold is 0.5",
        "  before: 0.1",
        "  iteration-9: 0.3",
        "  after: 0.2",
    ]


@pytest.mark.parametrize("broken", [{}, {"heldout": None}, {"other": 1.0}])
def test_every_evaluation_must_have_the_figure(tmp_path: Path, broken: dict[str, Any]) -> None:
    values = {"before": (0, {"heldout": 0.9}), "after": (4, broken)}
    with pytest.raises(CheckFailed, match="evaluation after has no value of eval/heldout"):
        check_evaluations(ci_run(tmp_path, values))


def test_no_evaluation_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="the run evaluated nothing"):
        check_evaluations(ci_run(tmp_path, {}))
    with pytest.raises(CheckFailed, match="has no value"):
        verdict({"after": float("nan")}, "eval/x", 0.0)


@pytest.mark.parametrize(
    ("interval", "per_epoch", "expected"),
    [
        (None, None, []),
        (0, 3, []),
        (None, 3, []),
        (4, None, [4, 8]),
        (4, 3, [3, 4, 6, 8, 9]),
        (3, 3, [3, 6, 9]),
        (100, 5, [5]),
    ],
)
def test_what_is_due_after_each_of_nine_iterations(
    interval: int | None, per_epoch: int | None, expected: list[int]
) -> None:
    recipe = SimpleNamespace(rollouts_per_epoch=per_epoch)
    assert [done for done in range(1, 10) if due(recipe, done, interval)] == expected


@dataclass
class Section:
    """Values that can be copied with changes, as a section's can."""

    values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.values[name]

    def model_copy(self, *, update: dict[str, Any]) -> Section:
        return Section({**self.values, **update})


@dataclass(frozen=True)
class Epochs:
    """What of a recipe the length depends on."""

    train: Section
    optimizer: Section
    rollout: Section = field(default_factory=lambda: Section({"batch_size": 4}))
    data: Section = field(default_factory=lambda: Section({"source": "jsonl"}))
    rollouts_per_epoch: int | None = None


def epochs(
    count: int, *, steps: int = 1, decay: int | None = None, first: int | None = None
) -> Any:
    train = {
        "num_epoch": count,
        "num_rollout": None,
        "num_steps_per_rollout": steps,
        "start_rollout_id": first,
    }
    return Epochs(train=Section(train), optimizer=Section({"lr_decay_iters": decay}))


def rows(count: int | None) -> Any:
    return SimpleNamespace(rows=lambda: count)


@pytest.mark.parametrize(
    ("count", "data", "iterations", "per_epoch"), [(1, 4, 1, 1), (3, 11, 6, 2), (2, 100, 50, 25)]
)
def test_an_epoch_is_as_many_iterations_as_batches_are_full(
    count: int, data: int, iterations: int, per_epoch: int
) -> None:
    found = counted_in_iterations(epochs(count, steps=2), rows(data))
    assert found.train.num_rollout == iterations
    assert found.rollouts_per_epoch == per_epoch
    assert found.optimizer.lr_decay_iters == 2 * iterations
    kept = counted_in_iterations(epochs(count, decay=7), rows(data))
    assert kept.optimizer.lr_decay_iters == 7


def test_data_without_an_end_or_without_a_batch_have_no_epochs() -> None:
    with pytest.raises(BadInput, match=r"num_epoch = 2, but data\.source 'jsonl' has no end"):
        counted_in_iterations(epochs(2), rows(None))
    with pytest.raises(BadInput, match=r"3 rows .* fewer than rollout\.batch_size = 4"):
        counted_in_iterations(epochs(2), rows(3))
    with pytest.raises(BadInput, match=r"start_rollout_id = 4, but 2 epochs are iterations 0 to 3"):
        counted_in_iterations(epochs(2, first=4), rows(8))


def chosen(folder: Path, first: int | None) -> tuple[Any, Any]:
    run = SimpleNamespace(
        recipe=SimpleNamespace(train=SimpleNamespace(start_rollout_id=first)),
        first_rollout=3,
        remarks=[],
    )
    here = folder / "iter_0000003"
    return run, chosen_start(run, here, {"data": "of 3", "data_source": "jsonl"})


def test_the_checkpoints_iteration_is_the_start_unless_another_is_chosen(tmp_path: Path) -> None:
    for first in (None, 3):
        run, state = chosen(tmp_path, first)
        assert (run.first_rollout, state["data"], run.remarks) == (3, "of 3", [])


def test_a_chosen_start_wins_and_takes_the_data_of_its_own_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "iter_0000002" / "run.json").write_text('{"data": "of 2", "data_source": "jsonl"}')
    run, state = chosen(tmp_path, 2)
    assert (run.first_rollout, state["data"]) == (2, "of 2")
    assert run.remarks[0].startswith("train.start_rollout_id = 2 wins over iteration 3")
    for first in (0, 5):
        run, state = chosen(tmp_path, first)
        assert (run.first_rollout, state["data"]) == (first, None)
