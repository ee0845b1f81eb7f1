"""tools/reward_curves.py: which points are drawn, and what is said of a run without any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from reward_curves import COLOURS, FIGURE, drawing, main, smooth

SVG = "{http://www.w3.org/2000/svg}"


def run_of(folder: Path, rewards: Sequence[float]) -> Path:
    """Write the metrics of a run with these rewards, after a row of an evaluation."""
    folder.mkdir()
    rows = [{"step": -1, "eval/heldout": 0.5}]
    rows += [{"step": step, FIGURE: reward} for step, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_mean_has_as_many_points_on_both_sides() -> None:
    points = [(1.0, 0.0), (2.0, 3.0), (3.0, 6.0), (4.0, 3.0), (5.0, 0.0)]
    assert smooth(points, 1) == [(2.0, 3.0), (3.0, 4.0), (4.0, 3.0)]
    assert smooth(points, 0) == points
    assert smooth(points, 9) == [(3.0, pytest.approx(12 / 5))]  # no more than there are
    assert smooth(points[:2], 5) == points[:2]


def test_a_straight_line_stays_one() -> None:
    points = [(float(x), 2.0 * x) for x in range(20)]
    assert smooth(points, 5) == points[5:-5]


def test_each_run_has_a_line_and_a_row_of_the_legend(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first", [0.1, 0.2, 0.3])
    second = run_of(tmp_path / "second", [0.3, 0.2])
    out = tmp_path / "curves.svg"
    runs = [f"a < b={first}", f"other={second}"]
    assert main([*runs, "--half", "0", "--out", str(out)]) == 0
    root = ElementTree.parse(out).getroot()
    drawn = root.findall(f"{SVG}polyline")
    assert [line.get("stroke") for line in drawn] == list(COLOURS[:2])
    assert [len((line.get("points") or "").split()) for line in drawn] == [3, 2]
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert texts[-2:] == ["a < b", "other"]
    assert "iteration" in texts
    assert {"1", "3"} <= set(texts)  # iterations count from 1


def test_higher_rewards_are_drawn_higher_up() -> None:
    text = drawing({"low": [(1.0, 0.1), (2.0, 0.1)], "high": [(1.0, 0.9), (2.0, 0.9)]})
    low, high = ElementTree.fromstring(text).findall(f"{SVG}polyline")
    heights = [float((line.get("points") or "").split()[0].split(",")[1]) for line in (low, high)]
    assert heights[0] > heights[1]


def test_a_run_without_rewards_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, out = run_of(tmp_path / "good", [0.1]), tmp_path / "curves.svg"
    for wrong in (tmp_path / "absent", run_of(tmp_path / "empty", [])):
        assert main([f"good={good}", f"wrong={wrong}", "--out", str(out)]) == 2
        assert f"wrong={wrong}: no {FIGURE}" in capsys.readouterr().err
        assert not out.exists()
