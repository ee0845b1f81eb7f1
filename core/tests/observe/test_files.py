from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from drl.components import EMPTY
from drl.observe.files import (
    append_json_line,
    number,
    plain,
    read_json_lines,
    write_bytes_atomic,
    write_json_atomic,
    write_text_atomic,
)

ENDLESS_WRITER = """
import sys
from pathlib import Path
from drl.observe.files import write_text_atomic
path, number = Path(sys.argv[1]), 0
print("ready", flush=True)
while True:
    number += 1
    write_text_atomic(path, f"{number}\\n" * 100_000)
"""

STUCK_WRITER = """
import os, sys, time
from pathlib import Path
from drl.observe import files
def stuck(descriptor):
    print("half", flush=True)
    time.sleep(60)
os.fsync = stuck
files.write_text_atomic(Path(sys.argv[1]), "new")
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: float
    tags: tuple[str, ...] = ()


def test_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_text_atomic(path, "old")
    write_json_atomic(path, {"reward": 0.5})
    assert json.loads(path.read_text()) == {"reward": 0.5}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_text_atomic(path, "old")
    with pytest.raises(TypeError):
        write_bytes_atomic(path, "text is not bytes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="object has no JSON form"):
        write_json_atomic(path, {"engine": object()})
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_writer_killed_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_text_atomic(path, "old")
    writer = subprocess.Popen(
        [sys.executable, "-c", STUCK_WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "half\n"
    writer.kill()
    assert writer.wait(10) == -signal.SIGKILL
    writer.stdout.close()
    assert path.read_text() == "old"


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    for delay in (0.03, 0.07, 0.11):
        writer = subprocess.Popen(
            [sys.executable, "-c", ENDLESS_WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        while not path.exists():
            time.sleep(0.005)
        time.sleep(delay)
        writer.kill()
        writer.wait(10)
        writer.stdout.close()
        lines = path.read_text().splitlines()
        assert len(lines) == 100_000
        assert len(set(lines)) == 1


def test_plain_takes_what_a_run_holds_and_turns_non_finite_into_null(tmp_path: Path) -> None:
    value = {
        "point": Point(1.5, ("a", "b")),
        "empty": EMPTY,
        "path": Path("runs/a"),
        "set": {"b", "a"},
        "numpy": [np.float32(0.5), np.float64(0.25), np.int64(3)],
        "odd": [float("nan"), float("inf"), -float("inf")],
        "flag": True,
        7: None,
    }
    assert plain(value) == {
        "point": {"x": 1.5, "tags": ["a", "b"]},
        "empty": {},
        "path": "runs/a",
        "set": ["a", "b"],
        "numpy": [0.5, 0.25, 3],
        "odd": [None, None, None],
        "flag": True,
        "7": None,
    }


def test_text_that_utf8_cannot_hold_is_escaped_instead_of_lost(tmp_path: Path) -> None:
    write_text_atomic(tmp_path / "a", "lone \udce9 and whole é")
    assert (tmp_path / "a").read_text(encoding="utf-8") == "lone \\udce9 and whole é"


def test_json_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        append_json_line(path, {"step": step})
    assert read_json_lines(path) == ([{"step": 0}, {"step": 1}, {"step": 2}], [])


def test_a_torn_row_is_left_out_and_named_and_the_next_row_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_json_line(path, {"step": 0})
    with path.open("a") as handle:
        handle.write('{"step": 1, "train/lo')
    append_json_line(path, {"step": 1})
    rows, remarks = read_json_lines(path)
    assert rows == [{"step": 0}, {"step": 1}]
    assert remarks == ["metrics.jsonl line 2 is not a whole JSON object; it was left out"]


def test_lines_that_are_json_but_no_object_are_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"[1]\n\n\xff\xfe\n" + b"[" * 100_000 + b'\n{"step": 4}\n')
    rows, remarks = read_json_lines(path)
    assert rows == [{"step": 4}]
    assert [remark.split()[2] for remark in remarks] == ["1", "3", "4"]


def test_a_json_file_is_written_for_people_and_keeps_its_order(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json_atomic(path, {"b": [1, {"c": float("inf")}], "a": "żółw"})
    assert path.read_text() == (
        '{\n  "b": [\n    1,\n    {\n      "c": null\n    }\n  ],\n  "a": "\\u017c\\u00f3\\u0142w"\n}\n'
    )


def test_sets_come_in_order_and_the_types_of_a_class_are_no_value() -> None:
    assert plain(frozenset({"b", "a", "c"})) == ["a", "b", "c"]
    assert plain({3, 10, 2}) == [10, 2, 3]  # by their text, so that mixed sets have an order too
    for wrong in (Point, b"bytes", bytearray(b"x"), object(), 1j):
        with pytest.raises(TypeError, match="has no JSON form; give numbers, text, lists"):
            plain(wrong)


def test_a_first_row_has_no_empty_line_above_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_json_line(path, {"a": 1})
    assert path.read_text() == '{"a": 1}\n'
    append_json_line(path, {"a": 2})
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize("torn", ["{", '{"a": 1}', "x" * 5000])
def test_a_row_after_a_torn_one_starts_a_line_of_its_own(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(torn)
    append_json_line(path, {"a": 2})
    assert path.read_text() == f'{torn}\n{{"a": 2}}\n'


def test_blank_lines_are_nothing_and_lines_are_counted_with_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n  \t\n{"a": 1}\r\n\n7\n\xff\n')
    rows, remarks = read_json_lines(path)
    assert rows == [{"a": 1}]
    assert [remark.split()[2] for remark in remarks] == ["5", "6"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (-0.5, -0.5),
        (True, None),
        ("3", None),
        (None, None),
        ([1], None),
        (float("nan"), None),
        (float("-inf"), None),
        (10**400, None),
        (-(10**400), None),
    ],
)
def test_only_finite_numbers_of_usable_size_are_numbers(
    value: object, expected: float | None
) -> None:
    assert number(value) == expected


def test_a_folder_in_the_way_of_a_file_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.json" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write_text_atomic(tmp_path / "a.json", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json" / "inside").is_dir()


def test_a_folder_that_is_not_there_is_an_error_and_made_by_nobody(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_bytes_atomic(tmp_path / "absent" / "file", b"x")
    assert list(tmp_path.iterdir()) == []
