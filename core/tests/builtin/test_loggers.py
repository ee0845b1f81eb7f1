"""The jsonl logger: what is on disk, and what a resume leaves there."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from drl.api import Context, ContractError, RunFacts
from drl.builtin.logger_jsonl import JsonlLogger, drop_rows_from
from drl.errors import RunDirectoryError
from drl.testing.contracts.logger import LoggerContract


def facts(run_dir: Path, first: int = 0, total: int = 80) -> RunFacts:
    return RunFacts(name="glyphs", run_dir=run_dir, recipe={}, first=first, total=total)


def rows(run_dir: Path) -> list[dict[str, float]]:
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def log_steps(run_dir: Path, first: int, last: int) -> None:
    logger = JsonlLogger(None, Context())
    logger.start(facts(run_dir, first=first))
    for step in range(first, last):
        logger.metrics(step, {"train/loss": step + 0.5})
    logger.close()


class TestJsonl(LoggerContract):
    component = ("logger", "jsonl")

    @pytest.fixture
    def read_back(self, tmp_path: Path) -> Callable[[], Mapping[int, Mapping[str, float]]]:
        return lambda: {int(row.pop("step")): without_time(row) for row in rows(tmp_path)}


def without_time(row: dict[str, float]) -> dict[str, float]:
    assert row.pop("time") > 1.7e9
    return row


def test_a_row_is_on_disk_at_once(tmp_path: Path) -> None:
    logger = JsonlLogger(None, Context())
    logger.start(facts(tmp_path))
    logger.metrics(0, {"train/loss": 0.1})
    assert without_time(rows(tmp_path)[0]) == {"step": 0, "train/loss": 0.1}
    logger.close()


def test_figures_keep_every_digit(tmp_path: Path) -> None:
    logger = JsonlLogger(None, Context())
    logger.start(facts(tmp_path))
    logger.metrics(0, {"a": 1 / 3, "b": 5e-324, "c": 7})
    logger.close()
    assert without_time(rows(tmp_path)[0]) == {"step": 0, "a": 1 / 3, "b": 5e-324, "c": 7.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_figure_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    logger = JsonlLogger(None, Context())
    logger.start(facts(tmp_path))
    with pytest.raises(ContractError, match=r"'train/loss' is (nan|-?inf)"):
        logger.metrics(0, {"train/ok": 1.0, "train/loss": value})
    logger.close()
    assert rows(tmp_path) == []


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    logger = JsonlLogger(None, Context())
    logger.start(facts(tmp_path))
    with pytest.raises(ContractError, match="must not be called 'time'"):
        logger.metrics(0, {"time": 1.0})
    logger.close()


def test_logging_before_the_start_is_refused() -> None:
    with pytest.raises(RunDirectoryError, match="before start"):
        JsonlLogger(None, Context()).metrics(0, {})


def test_resuming_drops_the_rows_that_are_repeated(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 5)
    log_steps(tmp_path, 3, 6)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_resuming_twice_leaves_the_rows_of_a_straight_run(tmp_path: Path) -> None:
    straight, pieces = tmp_path / "straight", tmp_path / "pieces"
    straight.mkdir()
    pieces.mkdir()
    log_steps(straight, 0, 6)
    for first, last in ((0, 3), (2, 5), (4, 6)):
        log_steps(pieces, first, last)
    assert [without_time(row) for row in rows(pieces)] == [
        without_time(row) for row in rows(straight)
    ]


def test_a_run_killed_before_its_first_checkpoint_starts_its_file_anew(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 2)
    log_steps(tmp_path, 0, 1)
    assert [row["step"] for row in rows(tmp_path)] == [0]


def test_a_line_cut_by_a_kill_is_dropped(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 2)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "ti')
    log_steps(tmp_path, 2, 3)
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]


def test_a_strange_line_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nhello\n{"step": 5}\n', encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(RunDirectoryError, match="line 2 is not a row"):
        drop_rows_from(path, 1)
    assert path.read_bytes() == before


def test_a_file_without_repeated_rows_is_left_alone(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 2)
    path = tmp_path / "metrics.jsonl"
    before = path.stat().st_ino
    drop_rows_from(path, 2)
    assert path.stat().st_ino == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_row_is_readable_as_soon_as_it_is_logged_and_its_file_is_closed_at_the_end(
    tmp_path: Path,
) -> None:
    logger = JsonlLogger(None, Context())
    logger.start(facts(tmp_path))
    logger.metrics(0, {"train/loss": 1})
    assert rows(tmp_path)[0]["train/loss"] == 1.0
    path = str(tmp_path / "metrics.jsonl")
    assert path in open_files()
    logger.close()
    assert path not in open_files()
    with pytest.raises(RunDirectoryError, match="before start"):
        logger.metrics(1, {})


def open_files() -> set[str]:
    """Paths that this process has open."""
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("the system does not list open files under /proc")
    return {os.readlink(link) for link in folder.iterdir() if link.is_symlink()}


def test_times_have_milliseconds_and_figures_keep_every_digit(tmp_path: Path) -> None:
    logger = JsonlLogger(None, Context())
    logger.start(facts(tmp_path))
    logger.metrics(0, {"train/loss": 0.1 + 0.2, "zażółć/gęślą": 1e-300})
    logger.close()
    (row,) = rows(tmp_path)
    assert (row["train/loss"], row["zażółć/gęślą"]) == (0.1 + 0.2, 1e-300)
    assert row["time"] == round(row["time"], 3)


@pytest.mark.parametrize(
    ("first", "kept"), [(0, []), (1, [-1, 0]), (2, [-1, 0, 1]), (3, [-1, 0, 1, 2])]
)
def test_scores_before_training_stay_unless_the_run_starts_over(
    tmp_path: Path, first: int, kept: list[int]
) -> None:
    log_steps(tmp_path, -1, 3)
    drop_rows_from(tmp_path / "metrics.jsonl", first)
    assert [row["step"] for row in rows(tmp_path)] == kept


@pytest.mark.parametrize("line", ["[]", "{}", '{"step": null}', '{"step": "x"}', "7", ""])
def test_a_line_without_a_step_is_no_row(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n')
    with pytest.raises(RunDirectoryError, match=r"line 2 is not a row of metrics; move the file"):
        drop_rows_from(path, 1)
