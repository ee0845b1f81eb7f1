"""Which rows of metrics.jsonl stay when a run goes on, and when it starts over."""

from __future__ import annotations

import json

import pytest

from drl.builtin.logger_jsonl import drop_rows_from
from drl.errors import RunDirectoryError


@pytest.fixture
def file(tmp_path):
    """Rows of the untrained weights and of three iterations."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(-1, 3)))
    return path


def steps(file):
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize(("first", "left"), [(3, [-1, 0, 1, 2]), (2, [-1, 0, 1]), (1, [-1, 0])])
def test_a_run_that_goes_on_keeps_the_rows_before_it(file, first, left):
    drop_rows_from(file, first)
    assert steps(file) == left


def test_a_run_that_starts_over_scores_its_untrained_weights_again(file):
    drop_rows_from(file, 0)
    assert file.read_text() == ""


@pytest.mark.parametrize("torn", ['{"step": 3', '{"step": 1}', "\x00\x00"])
def test_a_row_without_an_end_goes_whatever_it_holds(file, torn):
    whole = file.read_text()
    file.write_text(whole + torn)
    drop_rows_from(file, 3)
    assert file.read_text() == whole
    assert [path.name for path in file.parent.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_stays_as_it_is_is_not_written(file):
    before = file.stat()
    drop_rows_from(file, 3)
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_a_broken_row_in_between_is_named_and_nothing_is_lost(file):
    text = file.read_text().replace('{"step": 0}', '{"step": ')
    file.write_text(text)
    with pytest.raises(RunDirectoryError, match="line 2 is not a row of metrics"):
        drop_rows_from(file, 0)
    assert file.read_text() == text
